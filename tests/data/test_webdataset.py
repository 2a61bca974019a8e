"""Test the items that a rank reads from its shards, their order and integrity, and reports of
unusable ones."""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from clap_ds.config.model import INT16_SCALE, ClapConfig
from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, write_manifest
from clap_ds.data.webdataset import WebDatasetStream
from clap_ds.weights.hub import load_tokenizer
from tests.data.builds import tone
from tests.data.conftest import OpenSource
from tests.data.tars import marked_item, marked_tars, number_of, numbers_in, put, wav, write_tar


def test_waveforms_and_captions_belong_together(
    tmp_path: Path, open_source: OpenSource, tokenizer_dir: str
) -> None:
    """The seed determines the order; torch's global generator is unchanged."""
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    orders = []
    pattern = marked_tars(tmp_path, 2, 10)
    random_state = torch.get_rng_state()
    for seed in (0, 0, 1):
        with open_source(pattern, micro_batch=20, shuffle_buffer=20, seed=seed) as source:
            batch = next(source)
        orders.append([number_of(waveform) for waveform in batch.audio])
        captions = [
            tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in batch.input_ids
        ]
        assert captions == [f"tone {number}" for number in orders[-1]]
    assert batch.audio.shape == (20, 480)
    assert batch.input_ids.shape == batch.attention_mask.shape == (20, 12)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert orders[0] == orders[1] != orders[2]
    assert [*map(sorted, orders)] == [[*range(20)]] * 3


def test_rows_stay_until_the_next_are_asked_for(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig
) -> None:
    """Even if the workers, which reuse their memory, run far ahead."""
    options = {"tokenizer": tokenizer_dir, "num_workers": 2, "shuffle_buffer": 0}
    data = ShardData(source="webdataset", shards=marked_tars(tmp_path, 2, 50), **options)
    with contextlib.closing(WebDatasetStream(data, BatchSpec(micro, 12, 70))) as pieces:
        for _ in range(6):
            rows = [batch.audio for batch in next(pieces)]
            before = torch.cat(rows)
            time.sleep(0.05)
            assert torch.equal(torch.cat(rows), before)


def test_crops_and_captions_are_drawn_anew_in_each_pass(
    tmp_path: Path, open_source: OpenSource, tokenizer_dir: str
) -> None:
    ramp = np.arange(1, 2001, dtype=np.float32) / 4000
    captions = ["a loud tone", "a click"]
    write_tar(
        tmp_path / "a.tar",
        [("a.wav", wav(ramp)), ("a.json", json.dumps({"title": captions}).encode())],
    )
    with open_source(str(tmp_path / "a.tar"), micro_batch=30, caption_key="tags;title") as source:
        batch = next(source)
    starts = (batch.audio[:, 0] / INT16_SCALE * 4000).round().long().tolist()
    assert len(set(starts)) > 20
    assert 0 <= min(starts) < 300 < 1220 < max(starts) <= 1520
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    assert {
        tokenizer.decode(row, skip_special_tokens=True) for row in batch.input_ids.tolist()
    } == set(captions)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_log_names_the_captions_used_and_the_others_once(
    tmp_path: Path, open_source: OpenSource, capfd: pytest.CaptureFixture[str], num_workers: int
) -> None:
    described = b'{"caption": "a click", "text": "a tone", "tag": "x"}'
    sounds = [(f"{number}.wav", wav(tone(number))) for number in range(4)]
    captions = [(f"{number}.txt", b"a hum") for number in range(4)]
    others = [(f"{number}.json", described) for number in range(4)]
    write_tar(tmp_path / "several.tar", sorted(sounds + captions + others))
    write_tar(tmp_path / "one.tar", sorted(sounds + captions))
    for rank in range(2):
        with open_source(
            str(tmp_path / "several.tar"), num_workers=num_workers, rank=rank, world_size=2
        ) as source:
            for _ in range(8):
                next(source)
    (line,) = capfd.readouterr().err.splitlines()
    assert "'text', not caption, txt" in line
    with open_source(str(tmp_path / "one.tar"), num_workers=num_workers) as source:
        next(source)
    assert not capfd.readouterr().err


BROKEN_ITEMS = [
    ("garbage", [("garbage.flac", b"no audio"), ("garbage.txt", b"x")], "can't be decoded"),
    (
        "one_sample",
        [("one_sample.wav", wav(np.ones(1))), ("one_sample.txt", b"x")],
        "a single sample",
    ),
    ("mute", [("mute.wav", wav(np.zeros(9)))], "no caption"),
    ("deaf", [("deaf.txt", b"x")], "no audio"),
]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_broken_items_are_skipped_counted_and_named_once(
    tmp_path: Path, open_source: OpenSource, capsys: pytest.CaptureFixture[str], num_workers: int
) -> None:
    broken = [member for _, members, _ in BROKEN_ITEMS for member in members]
    write_tar(tmp_path / "mixed.tar", [*marked_item(1), *broken, *marked_item(2)])
    with open_source(str(tmp_path / "mixed.tar"), num_workers=num_workers) as source:
        assert numbers_in(source, 20) == [1, 2] * 40
        statistics = json.loads(json.dumps(source.statistics()))
    listed = statistics.pop("broken_items")
    counts = {
        "num_samples": 4,
        "epoch_samples": 4,
        "num_broken_items": 4,
    }  # a sample has sound and caption
    told = {"source": "webdataset", "kind": "encoded", "num_shards": 1, "num_workers": num_workers}
    assert statistics == told | counts
    stderr = capsys.readouterr().err.splitlines()
    for item, line, (name, _, reason) in zip(listed, stderr, BROKEN_ITEMS, strict=True):
        assert item["name"].endswith(f"mixed.tar: {name}")
        assert reason in item["reason"]
        assert f"{item['name']}: {item['reason']}" in line


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_worker_without_a_usable_item_stops_the_run(
    tmp_path: Path, open_source: OpenSource, num_workers: int
) -> None:
    others = set(multiprocessing.active_children())
    for tar in range(2):
        write_tar(tmp_path / f"{tar}.tar", BROKEN_ITEMS[0][1])
    source = open_source(str(tmp_path / "*.tar"), num_workers=num_workers)
    message = r"(?s)^clap\.data\.shards: no usable item .*2 shard\(s\), such as .*0\.tar; 2 broken, .*: audio can't"
    with pytest.raises(ValueError, match=message) as error:
        numbers_in(source, 100)
    assert "Traceback" not in str(error.value)
    assert not (set(multiprocessing.active_children()) - others)


def test_mixtures_give_each_source_its_share(tmp_path: Path, open_source: OpenSource) -> None:
    """Weights 1 to 3, although the lighter source has five times the items; each source has its own
    passes."""
    mixture = {
        marked_tars(tmp_path / "a", 2, 25): 1.0,
        marked_tars(tmp_path / "b", 2, 5, first=100): 3.0,
    }
    with open_source(mixture, micro_batch=50, num_workers=2, shuffle_buffer=8) as source:
        numbers = numbers_in(source, 16)
    heavy = [numbers.count(number) for number in range(100, 110)]
    assert (
        abs(sum(heavy) / len(numbers) - 0.75) < 5 * (0.25 * 0.75 / len(numbers)) ** 0.5
    )  # 5 sigma
    assert max(heavy) - min(heavy) <= 6  # two workers, up to a pass apart at times
    light = [numbers.count(number) for number in range(50)]
    assert 1 <= min(light) <= max(light) <= 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_remote_shards_give_what_local_ones_do(
    tmp_path: Path, open_source: OpenSource, shard_cache: Path, num_workers: int
) -> None:
    """With and without space for their copies, from copies on the host's disk, and with a truncated
    one."""
    pattern = marked_tars(tmp_path, 4, 4)
    cut = tmp_path / "002.tar"
    cut.write_bytes(cut.read_bytes()[:9000])
    write_manifest(
        tmp_path, ShardManifest({f"{tar:03d}.tar": ShardRecord(4, 0, 0.0, "") for tar in range(4)})
    )
    for path in tmp_path.glob("*.*"):
        put(f"memory://copied/{path.name}", path.read_bytes())
    found = []
    stage_to = str(tmp_path / "disk")
    for shards, cache_gb, settings in (
        (pattern, 0, {}),
        ("memory://copied/{000..003}.tar", 0, {}),
        ("memory://copied/*.tar", 0, {"stage_to": stage_to}),
        ("memory://copied/*.tar", 1, {}),
    ):
        assert not list(shard_cache.glob("*.tar"))
        with open_source(
            shards, cache_gb=cache_gb, num_workers=num_workers, shuffle_buffer=5, **settings
        ) as source:
            found.append((numbers_in(source, 8), source.statistics()["num_broken_items"]))
    assert found[1:] == [found[0]] * 3
    assert found[0][1] == 1
    assert len(list(tmp_path.glob("disk/*/shards/*.tar"))) == 4
    assert len(list(shard_cache.glob("*.tar"))) == 4


@pytest.mark.end_to_end
def test_killed_worker_stops_the_run_with_a_message(
    tmp_path: Path, open_source: OpenSource
) -> None:
    """And only when data is requested: torch would raise it anywhere in training."""
    others = set(multiprocessing.active_children())
    with open_source(marked_tars(tmp_path, 2, 40), num_workers=2) as source:
        next(source)
        worker = (set(multiprocessing.active_children()) - others).pop()
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(0.5)
        message = rf"clap\.data\.num_workers: .* {worker.pid}\) was ended by SIGKILL; .*memory"
        with pytest.raises(ValueError, match=message):
            numbers_in(source, 1000)
    assert not (set(multiprocessing.active_children()) - others)
