"""Test the items that a rank reads from its shards, their order and integrity, and reports of
unusable ones."""

import contextlib
import json
import multiprocessing
import time
from typing import Any

import numpy as np
import pytest
import torch

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import Batch, BatchSpec
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from clap_ds.data.webdataset import WebDatasetStream
from clap_ds.weights.hub import load_tokenizer
from tests.data.tars import marked_item, marked_tars, number_of, numbers_in, put, wav, write_tar


def captions_of(batch: Batch, tokenizer_dir: str) -> list[str]:
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch.input_ids.tolist()]


def test_waveforms_have_their_captions_in_order_of_seed(tmp_path, open_source, tokenizer_dir):
    pattern = marked_tars(tmp_path, 2, 10)
    random_state = torch.get_rng_state()
    orders = []
    for seed in (0, 0, 1):
        with open_source(pattern, micro_batch=20, shuffle_buffer=20, seed=seed) as source:
            batch = next(source)
        numbers = [number_of(waveform) for waveform in batch.audio]
        assert captions_of(batch, tokenizer_dir) == [f"tone {number}" for number in numbers]
        assert sorted(numbers) == list(range(20))
        orders.append(numbers)
    # Dropout uses torch's global generator.
    assert torch.equal(torch.get_rng_state(), random_state)
    assert orders[0] == orders[1] != orders[2]


def test_rows_stay_until_next_is_called(tmp_path, tokenizer_dir, micro):
    """Even if the workers, which reuse their memory, run far ahead."""
    options: Any = {"tokenizer": tokenizer_dir, "num_workers": 2, "shuffle_buffer": 0}
    data = ShardData(source="webdataset", shards=marked_tars(tmp_path, 2, 50), **options)
    with contextlib.closing(WebDatasetStream(data, BatchSpec(micro, 12, 70))) as stream:
        for _ in range(6):
            rows = [piece.audio for piece in next(stream)]
            copied = torch.cat(rows)
            time.sleep(0.05)
            assert torch.equal(torch.cat(rows), copied)


def test_crops_and_captions_are_random_in_each_pass(tmp_path, open_source, tokenizer_dir):
    # Crops have 480 of 2000 samples.
    ramp = np.arange(1, 2001, dtype=np.float32) / 4000
    captions = ["a loud tone", "a click"]
    fields = json.dumps({"title": captions}).encode()
    tar = write_tar(tmp_path / "a.tar", [("a.wav", wav(ramp)), ("a.json", fields)])
    with open_source(str(tar), micro_batch=30, caption_key="tags;title") as source:
        batch = next(source)
    assert len(set(batch.audio[:, 0].tolist())) > 20
    assert set(captions_of(batch, tokenizer_dir)) == set(captions)


def test_kinds_of_captions_are_logged_once(tmp_path, open_source, capfd):
    fields = b'{"caption": "a click", "text": "a tone", "tag": "x"}'
    members = []
    for number in range(4):
        members += [*marked_item(number), (f"{number:04d}.json", fields)]
    tar = write_tar(tmp_path / "a.tar", members)
    for rank in range(2):
        with open_source(str(tar), num_workers=2, rank=rank, world_size=2) as source:
            numbers_in(source, 8)
    (line,) = capfd.readouterr().err.splitlines()
    assert "'text', not caption, txt" in line


def test_worker_without_usable_item_raises(tmp_path, open_source):
    processes = set(multiprocessing.active_children())
    for tar in range(2):
        write_tar(tmp_path / f"{tar}.tar", [("a.flac", b"no audio"), ("a.txt", b"x")])
    source = open_source(str(tmp_path / "*.tar"), num_workers=2)
    message = r"(?s)^clap\.data\.shards: no usable item .*2 shard\(s\), such as .*0\.tar; 2 broken, .*: audio can't"
    with pytest.raises(ValueError, match=message):
        next(source)
    assert set(multiprocessing.active_children()) == processes


def test_mixture_draws_sources_by_weight(tmp_path, open_source):
    """Weights 1 to 3, although the lighter source has five times the items."""
    light = marked_tars(tmp_path / "light", 2, 25)
    heavy = marked_tars(tmp_path / "heavy", 2, 5, first=100)
    mixture = {light: 1.0, heavy: 3.0}
    with open_source(mixture, micro_batch=50, num_workers=2, shuffle_buffer=8) as source:
        numbers = numbers_in(source, 16)
    num_heavy = sum(number >= 100 for number in numbers)
    sigma = (0.25 * 0.75 / len(numbers)) ** 0.5
    assert num_heavy / len(numbers) == pytest.approx(0.75, abs=5 * sigma)


def test_remote_and_staged_shards_equal_local_ones(tmp_path, open_source, shard_cache):
    """With and without space for their copies."""
    pattern = marked_tars(tmp_path / "tars", 4, 4)
    record = ShardRecord(4, 0, 0.0, "")
    records = {f"{tar:03d}.tar": record for tar in range(4)}
    write_manifest(tmp_path / "tars", ShardManifest(records))
    for path in (tmp_path / "tars").iterdir():
        put(f"memory://copied/{path.name}", path.read_bytes())
    results = []
    for shards, settings in (
        (pattern, {"cache_gb": 0}),
        ("memory://copied/*.tar", {"cache_gb": 0}),
        ("memory://copied/*.tar", {"cache_gb": 0, "stage_to": str(tmp_path / "disk")}),
        ("memory://copied/*.tar", {"cache_gb": 1}),
    ):
        assert not list(shard_cache.glob("*.tar"))
        with open_source(shards, num_workers=2, shuffle_buffer=5, **settings) as source:
            results.append(numbers_in(source, 8))
    assert results == [results[0]] * 4
    assert len(list(tmp_path.glob("disk/*/shards/*.tar"))) == 4
    assert len(list(shard_cache.glob("*.tar"))) == 4
