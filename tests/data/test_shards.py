from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import tarfile
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import ShardData
from clap_ds.data.batch import BatchSource, build_batches
from clap_ds.data.shard_manifest import ShardRecord, write_manifest
from clap_ds.data.shards import epoch_samples
from clap_ds.model.tokenizer import load_tokenizer
from tests.data.tars import marked_item, number_of, wav, write_tar


def open_source(
    pattern: str | list[str] | dict[str, float],
    tokenizer_dir: str,
    model: ClapConfig,
    *,
    micro_batch: int = 4,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    **settings: Any,
) -> BatchSource:
    settings = {"num_workers": 0, "shuffle_buffer": 0, **settings}
    return build_batches(
        ShardData(source="shards", shards=pattern, tokenizer=tokenizer_dir, **settings),
        model=model,
        text_tokens=12,
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        seed=seed,
        device=torch.device("cpu"),
    )


def numbers_in(source: BatchSource, num_batches: int) -> list[int]:
    """Which marked items come, in order."""
    return [number_of(row) for _ in range(num_batches) for row in next(source).waveforms]


def marked_tars(directory: Path, num_tars: int, items_per_tar: int) -> str:
    for tar in range(num_tars):
        first = tar * items_per_tar
        members = [member for number in range(first, first + items_per_tar) for member in marked_item(number)]
        write_tar(directory / f"{tar:03d}.tar", members)
    return str(directory / f"{{000..{num_tars - 1:03d}}}.tar")


@pytest.mark.parametrize("micro_batch", [1, 3, 20, 40])
def test_every_item_comes_once_a_pass_in_file_order(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig, micro_batch: int
) -> None:
    """Micro-batches smaller and larger than the pieces of 16, and than a pass of 14 items."""
    with open_source(marked_tars(tmp_path, 2, 7), tokenizer_dir, micro, micro_batch=micro_batch) as source:
        assert numbers_in(source, 4) == [count % 14 for count in range(4 * micro_batch)]


def test_waveforms_and_captions_belong_together(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    with open_source(marked_tars(tmp_path, 1, 5), tokenizer_dir, micro, micro_batch=5, shuffle_buffer=5) as source:
        batch = next(source)
    assert batch.waveforms.shape == (5, 480)
    assert batch.input_ids.shape == batch.attention_mask.shape == (5, 12)
    for waveform, ids in zip(batch.waveforms, batch.input_ids, strict=True):
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=True) == f"tone {number_of(waveform)}"


def test_ranks_and_workers_see_disjoint_and_complete_sets(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig
) -> None:
    """4 tars of 16 items over 2 ranks × 2 worker processes: one pass of a rank is 32 items."""
    pattern = marked_tars(tmp_path, 4, 16)
    others = set(multiprocessing.active_children())
    seen = []
    for rank in range(2):
        with open_source(
            pattern, tokenizer_dir, micro, rank=rank, world_size=2, num_workers=2, shuffle_buffer=4
        ) as source:
            seen.append(numbers_in(source, 16))
    for numbers in seen:
        assert sorted(numbers) == sorted(2 * list(set(numbers)))
        assert len(set(numbers)) == 32
    assert set(seen[0]) | set(seen[1]) == set(range(64))
    assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize("num_workers", [0, 2])
def test_same_seed_same_order(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig, num_workers: int) -> None:
    pattern = marked_tars(tmp_path, 4, 10)
    orders = []
    for seed in (0, 0, 1):
        with open_source(
            pattern, tokenizer_dir, micro, seed=seed, num_workers=num_workers, shuffle_buffer=20
        ) as source:
            orders.append(numbers_in(source, 20))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_passes_differ_and_crops_are_drawn(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    ramp = np.arange(1, 2001, dtype=np.float32) / 4000
    write_tar(tmp_path / "ramp.tar", [("ramp.wav", wav(ramp)), ("ramp.txt", b"a ramp")])
    with open_source(str(tmp_path / "ramp.tar"), tokenizer_dir, micro, micro_batch=30) as source:
        starts = (next(source).waveforms[:, 0] * 4000).round().long().tolist()
    assert len(set(starts)) > 20
    assert 0 <= min(starts) < 300
    assert 1220 < max(starts) <= 1520


def test_loading_leaves_the_global_generator_alone(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with open_source(marked_tars(tmp_path, 1, 4), tokenizer_dir, micro, shuffle_buffer=3) as source:
        next(source)
    assert torch.equal(torch.rand(3), expected)


BROKEN_ITEMS = [
    ("garbage", [("garbage.flac", b"no audio"), ("garbage.txt", b"x")], "can't be decoded"),
    ("empty", [("empty.wav", b""), ("empty.txt", b"x")], "can't be decoded"),
    ("zero_length", [("zero_length.wav", wav(np.zeros(0))), ("zero_length.txt", b"x")], "no samples"),
    ("one_sample", [("one_sample.wav", wav(np.ones(1))), ("one_sample.txt", b"x")], "a single sample"),
    ("silent", [("silent.wav", wav(np.zeros(480))), ("silent.txt", b"x")], "is silent"),
    ("nan", [("nan.wav", wav(np.array([0.1, np.nan]))), ("nan.txt", b"x")], "NaN"),
    ("mute", [("mute.wav", wav(np.zeros(9)))], "no caption"),
    ("blank", [("blank.wav", wav(np.zeros(9))), ("blank.txt", b" ")], "empty caption"),
    ("deaf", [("deaf.txt", b"x")], "no audio"),
]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_broken_items_are_skipped_counted_and_named_once(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig, capsys: pytest.CaptureFixture[str], num_workers: int
) -> None:
    members = marked_item(1)
    for _, broken, _ in BROKEN_ITEMS:
        members += broken
    write_tar(tmp_path / "mixed.tar", [*members, *marked_item(2)])
    with open_source(str(tmp_path / "mixed.tar"), tokenizer_dir, micro, num_workers=num_workers) as source:
        assert numbers_in(source, 20) == [1, 2] * 40
        statistics = source.statistics()
    assert statistics["num_broken_items"] == len(BROKEN_ITEMS)
    assert 3 <= len(statistics["broken_items"]) <= len(BROKEN_ITEMS)
    first = statistics["broken_items"][0]
    assert first["name"].endswith("mixed.tar: garbage")
    assert "can't be decoded" in first["reason"]
    stderr = capsys.readouterr().err.splitlines()
    for name, _, reason in BROKEN_ITEMS:
        lines = [line for line in stderr if f"mixed.tar: {name}:" in line]
        assert len(lines) == 1
        assert reason in lines[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_only_broken_items_stop_the_run(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig, num_workers: int
) -> None:
    others = set(multiprocessing.active_children())
    for tar in range(2):
        write_tar(tmp_path / f"{tar:03d}.tar", [member for _, members, _ in BROKEN_ITEMS for member in members])
    source = open_source(str(tmp_path / "{000..001}.tar"), tokenizer_dir, micro, num_workers=num_workers)
    with pytest.raises(
        ValueError, match=r"(?s)^clap\.data\.shards: .*no usable item; \d+ broken.*garbage: audio can't"
    ) as error:
        next(source)
    assert "Traceback" not in str(error.value)
    assert not (set(multiprocessing.active_children()) - others)


def test_one_worker_without_a_usable_item_stops_the_run(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    others = set(multiprocessing.active_children())
    write_tar(tmp_path / "000.tar", [member for number in range(20) for member in marked_item(number)])
    write_tar(tmp_path / "001.tar", BROKEN_ITEMS[0][1])
    source = open_source(str(tmp_path / "{000..001}.tar"), tokenizer_dir, micro, num_workers=2)
    with pytest.raises(ValueError, match=r"1 shard\(s\) gave no usable item; 1 broken.*001\.tar: garbage"):
        numbers_in(source, 100)
    assert not (set(multiprocessing.active_children()) - others)


def test_file_that_is_no_tar_stops_the_run(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    (tmp_path / "text.tar").write_bytes(b"this is a text file\n" * 2000)
    source = open_source(str(tmp_path / "text.tar"), tokenizer_dir, micro)
    with pytest.raises(ValueError, match=r"no usable item; 1 broken.*text\.tar: tar can't be read"):
        next(source)


def truncation_points(path: Path) -> dict[str, tuple[int, int]]:
    """Where a tar of 3 marked items may be cut: (bytes kept, whole items before the cut)."""
    with tarfile.open(path) as tar:
        last_audio = tar.getmember("0002.wav")
        last_text = tar.getmember("0002.txt")
    return {
        "within audio": (last_audio.offset_data + 600, 2),
        "between members": (last_audio.offset, 2),
        "within a header": (last_audio.offset + 100, 2),
        "within padding": (last_text.offset_data + 100, 3),
        "before the closing blocks": (last_text.offset_data + 512, 3),
    }


@pytest.mark.parametrize(
    "place", ["within audio", "between members", "within a header", "within padding", "before the closing blocks"]
)
def test_truncated_tar_is_named_and_its_readable_items_used(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_tar(tmp_path / "whole.tar", [member for number in range(3) for member in marked_item(number)])
    size, num_items = truncation_points(whole)[place]
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole.read_bytes()[:size])
    with open_source([str(cut), str(whole)], tokenizer_dir, micro, micro_batch=num_items + 3) as source:
        assert numbers_in(source, 3) == 3 * [*range(num_items), 0, 1, 2]
        statistics = source.statistics()
    assert statistics["num_broken_items"] == 1
    assert statistics["broken_items"][0]["name"] == str(cut)
    stderr = capsys.readouterr().err
    assert stderr.count("cut.tar: tar is truncated or damaged") == 1
    assert "whole.tar" not in stderr


def test_half_an_item_does_not_reach_the_next_tar(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    """The cut leaves audio without its caption, and the next tar starts with an item of the same name."""
    first = write_tar(tmp_path / "first.tar", [*marked_item(1), *marked_item(2)])
    with tarfile.open(first) as tar:
        cut = tar.getmember("0002.txt").offset_data + 3
    first.write_bytes(first.read_bytes()[:cut])
    second = write_tar(tmp_path / "second.tar", [("0002.txt", b"tone 3"), ("0002.wav", wav(np.full(480, 0.004)))])
    with open_source([str(first), str(second)], tokenizer_dir, micro, micro_batch=2) as source:
        assert numbers_in(source, 2) == [1, 3, 1, 3]
        assert source.statistics()["num_broken_items"] == 2  # the tar, and the item that lost its caption


def test_compressed_tars_are_read(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    plain = write_tar(tmp_path / "plain.tar", [*marked_item(1), *marked_item(2)])
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with open_source(str(packed), tokenizer_dir, micro, micro_batch=2) as source:
        assert numbers_in(source, 2) == [1, 2, 1, 2]
        assert source.statistics()["num_broken_items"] == 0


def test_shard_that_vanishes_is_named_and_the_rest_used(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    pattern = marked_tars(tmp_path, 2, 2)
    with open_source(pattern, tokenizer_dir, micro, micro_batch=2) as source:
        (tmp_path / "000.tar").unlink()
        assert numbers_in(source, 10)[-6:] == [2, 3] * 3
        assert source.statistics()["num_broken_items"] == 1


def test_captions_of_several_are_all_drawn(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    captions = ["a loud tone", "a click"]
    write_tar(tmp_path / "a.tar", [("a.wav", wav(np.ones(9))), ("a.json", json.dumps({"caption": captions}).encode())])
    with open_source(str(tmp_path / "a.tar"), tokenizer_dir, micro, micro_batch=30) as source:
        ids = next(source).input_ids.tolist()
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    assert {tokenizer.decode(row, skip_special_tokens=True) for row in ids} == set(captions)


def test_statistics_fit_a_json_record(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    with open_source(marked_tars(tmp_path, 3, 2), tokenizer_dir, micro, num_workers=0) as source:
        next(source)
        record = json.loads(json.dumps(source.statistics()))
    assert record == {"source": "shards", "num_shards": 3, "num_workers": 0, "num_broken_items": 0, "broken_items": []}


def test_mixtures_give_each_source_its_share(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    """Weights 1 to 3, though the lighter source has five times the items; each source goes on with its own passes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    marked_tars(tmp_path / "a", 2, 25)
    for number in range(2):
        first = 100 + 5 * number
        write_tar(tmp_path / "b" / f"{number}.tar", [m for item in range(first, first + 5) for m in marked_item(item)])
    mixture = {str(tmp_path / "a" / "*.tar"): 1.0, str(tmp_path / "b" / "*.tar"): 3.0}
    with open_source(mixture, tokenizer_dir, micro, micro_batch=50, num_workers=2, shuffle_buffer=8) as source:
        numbers = numbers_in(source, 16)
    heavy = [number for number in numbers if number >= 100]
    five_sigma = 5 * (0.25 * 0.75 / len(numbers)) ** 0.5
    assert abs(len(heavy) / len(numbers) - 0.75) < five_sigma
    counts = [heavy.count(number) for number in range(100, 110)]
    assert max(counts) - min(counts) <= 6  # two workers, up to a pass apart at times
    light = [number for number in numbers if number < 100]
    assert set(light) == set(range(50))
    assert max(light.count(number) for number in range(50)) <= 6


def test_drawn_with_replacement_shards_differ_between_ranks_and_workers(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig
) -> None:
    """Even with fewer shards than ranks; all are drawn in the end."""
    pattern = marked_tars(tmp_path, 3, 4)
    orders = []
    for rank in (0, 7):
        with open_source(
            pattern, tokenizer_dir, micro, rank=rank, world_size=8, sampling="replacement", num_workers=2
        ) as source:
            orders.append(numbers_in(source, 30))
    assert orders[0] != orders[1]
    for order in orders:
        assert set(order) == set(range(12))
        counts = [order.count(4 * tar) for tar in range(3)]
        assert len(set(counts)) > 1 or counts != [10, 10, 10]


def test_int16_waveforms_arrive_as_floats(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    rng = np.random.default_rng(0)
    audio = rng.uniform(-1, 1, (20, 480)).astype(np.float32)
    audio[0, :2] = 1, -1
    members = [
        (f"{n:02d}.{kind}", wav(row) if kind == "wav" else b"x")
        for n, row in enumerate(audio)
        for kind in ("wav", "txt")
    ]
    write_tar(tmp_path / "a.tar", members)
    for micro_batch in (20, 5):  # of several pieces, and of one
        with open_source(
            str(tmp_path / "a.tar"), tokenizer_dir, micro, micro_batch=micro_batch, waveforms="int16"
        ) as source:
            waveforms = next(source).waveforms
        assert waveforms.dtype == torch.float32
        error = (waveforms - torch.from_numpy(audio[:micro_batch])).abs().max()
        assert 0 < error <= 0.5001 / 32767
        assert waveforms[0, :2].tolist() == [1, -1]


def test_remote_shards_are_streamed(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    marked_tars(tmp_path, 2, 4)
    for tar in tmp_path.glob("*.tar"):
        with fsspec.open(f"memory://streamed/{tar.name}", "wb") as file:
            file.write(tar.read_bytes())
    for pattern in ("memory://streamed/{000..001}.tar", "memory://streamed/*.tar"):
        for num_workers in (0, 2):
            with open_source(pattern, tokenizer_dir, micro, num_workers=num_workers, micro_batch=8) as source:
                assert sorted(numbers_in(source, 2)) == sorted(2 * list(range(8)))


def test_epoch_samples(tmp_path: Path) -> None:
    pattern = marked_tars(tmp_path, 2, 5)
    write_tar(
        tmp_path / "002.tar",
        [*marked_item(1), ("x.wav", b"no caption"), ("y.txt", b"no audio"), ("z.flac", b""), ("z.json", b"")],
    )
    data = ShardData(source="shards", shards={pattern: 2.0, str(tmp_path / "002.tar"): 1.0}, tokenizer="x")
    assert epoch_samples(data) == 12
    write_manifest(tmp_path, {"000.tar": ShardRecord(items=700, bytes=0, seconds=0.0, sha256="")})
    assert epoch_samples(data) == 707
    with fsspec.open("memory://unknown/a.tar", "wb") as file:
        file.write((tmp_path / "000.tar").read_bytes())
    assert epoch_samples(ShardData(source="shards", shards="memory://unknown/a.tar", tokenizer="x")) is None
    with fsspec.open("memory://unknown/manifest.json", "wb") as file:
        file.write((tmp_path / "manifest.json").read_bytes().replace(b"000.tar", b"a.tar"))
    assert epoch_samples(ShardData(source="shards", shards="memory://unknown/a.tar", tokenizer="x")) == 700


def test_audio_of_any_rate_and_number_of_channels_is_used(
    tmp_path: Path, tokenizer_dir: str, micro: ClapConfig
) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 500 * np.arange(80) / 8000)
    members = [
        ("a.wav", wav(tone, 8000)),
        ("a.txt", b"x"),
        ("b.wav", wav(np.tile(tone[:, None], 7), 8000)),
        ("b.txt", b"x"),
    ]
    write_tar(tmp_path / "a.tar", members)
    with open_source(str(tmp_path / "a.tar"), tokenizer_dir, micro, micro_batch=2) as source:
        waveforms = next(source).waveforms
        assert source.statistics()["num_broken_items"] == 0
    expected = 0.5 * torch.sin(2 * torch.pi * 500 * torch.arange(480) / 48000)
    assert (waveforms[:, 50:-50] - expected[50:-50]).abs().max() < 0.02


def test_captions_in_another_script(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    """A byte-level tokenizer takes any; one of words says which item it knows no part of."""
    write_tar(tmp_path / "a.tar", [*marked_item(1), ("k.wav", wav(np.full(480, 0.003))), ("k.txt", "колокол".encode())])
    with open_source(str(tmp_path / "a.tar"), tokenizer_dir, micro, micro_batch=2) as source:
        ids = next(source).input_ids[1]
    assert load_tokenizer(tokenizer_dir, vocab_size=512).decode(ids, skip_special_tokens=True).startswith("коло")
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "tone": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", pad_token="<pad>").save_pretrained(
        tmp_path / "words"
    )
    with open_source(str(tmp_path / "a.tar"), str(tmp_path / "words"), micro, micro_batch=2) as source:
        assert numbers_in(source, 1) == [1, 1]
        broken = source.statistics()["broken_items"]
    assert [item["reason"] for item in broken] == ["the tokenizer knows no part of the caption 'колокол'"]


@pytest.mark.end_to_end
def test_killed_worker_stops_the_run_with_a_message(tmp_path: Path, tokenizer_dir: str, micro: ClapConfig) -> None:
    """And only where data is asked for: torch would raise it wherever training is."""
    others = set(multiprocessing.active_children())
    with open_source(marked_tars(tmp_path, 2, 40), tokenizer_dir, micro, num_workers=2) as source:
        next(source)
        worker = (set(multiprocessing.active_children()) - others).pop()
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(
            ValueError,
            match=rf"clap\.data\.num_workers: a data worker \(process {worker.pid}\) was ended by SIGKILL; .*memory",
        ):
            numbers_in(source, 1000)
    assert not (set(multiprocessing.active_children()) - others)
