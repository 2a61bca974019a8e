"""An interrupted run sees exactly the samples that an uninterrupted one sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import ShardData, SyntheticData
from clap_ds.data import shard_reader
from clap_ds.data.batch import Batch, BatchSource, build_batches
from tests.data.tars import marked_item, number_of, wav, write_tar

NUM_BATCHES = 14


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 tars of 13 items: longer than a clip, so that crops are drawn, with several captions, some of them broken."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    captions = json.dumps({"caption": ["a loud tone", "a quiet tone", "a click"]}).encode()
    for tar in range(4):
        members = []
        for item in range(13):
            name = f"{tar}{item:02d}"
            audio = b"no audio" if item % 5 == 2 else wav(rng.uniform(-1, 1, 700))
            members += [(f"{name}.wav", audio), (f"{name}.json", captions)]
        write_tar(folder / f"{tar}.tar", members)
    whole = (folder / "3.tar").read_bytes()
    (folder / "3.tar").write_bytes(whole[: len(whole) // 2])
    return folder


def open_source(
    shards: str | dict[str, float],
    tokenizer_dir: str,
    model: ClapConfig,
    state: dict[str, Any] | None = None,
    *,
    micro_batch: int = 20,
    world_size: int = 1,
    **settings: Any,
) -> BatchSource:
    settings = {"num_workers": 0, "shuffle_buffer": 9, **settings}
    return build_batches(
        ShardData(source="shards", shards=shards, tokenizer=tokenizer_dir, **settings),
        model=model,
        text_tokens=12,
        micro_batch=micro_batch,
        rank=0,
        world_size=world_size,
        seed=0,
        device=torch.device("cpu"),
        state=None if state is None else json.loads(json.dumps(state)),
    )


def same(batch: Batch, expected: Batch) -> bool:
    return all(torch.equal(*pair) for pair in zip(batch.tensors(), expected.tensors(), strict=True))


def check_exact(stops: list[int], **arguments: Any) -> None:
    with open_source(**arguments) as source:
        states = [source.state()]
        expected = []
        for _ in range(NUM_BATCHES):
            expected.append(next(source))
            states.append(source.state())
    assert not same(expected[0], expected[1])
    for stop in stops:
        with open_source(**arguments, state=states[stop]) as source:
            for number in range(stop, NUM_BATCHES):
                assert same(next(source), expected[number]), (stop, number)
            assert source.state() == states[-1]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("micro_batch", [5, 20])
@pytest.mark.parametrize("shuffle_buffer", [0, 9])
def test_interrupted_equals_uninterrupted(
    shards: Path, tokenizer_dir: str, micro: ClapConfig, num_workers: int, micro_batch: int, shuffle_buffer: int
) -> None:
    """Over several passes, with pieces that micro-batches cut (20 rows from pieces of 16), broken items and a cut tar."""
    check_exact(
        [0, 1, 6, 13] if num_workers == 0 else [1, 6],
        shards=str(shards / "*.tar"),
        tokenizer_dir=tokenizer_dir,
        model=micro,
        num_workers=num_workers,
        micro_batch=micro_batch,
        shuffle_buffer=shuffle_buffer,
    )


@pytest.mark.parametrize("sampling", ["epochs", "replacement"])
def test_mixtures_go_on_exactly(shards: Path, tokenizer_dir: str, micro: ClapConfig, sampling: str) -> None:
    check_exact(
        [1, 7],
        shards={str(shards / "{0,1}.tar"): 3.0, str(shards / "{2,3}.tar"): 1.0},
        tokenizer_dir=tokenizer_dir,
        model=micro,
        num_workers=2,
        sampling=sampling,
    )


def test_compressed_and_remote_tars_go_on_exactly(
    tmp_path: Path, shards: Path, tokenizer_dir: str, micro: ClapConfig
) -> None:
    """Of these, contents can't be left where they are."""
    import gzip

    import fsspec

    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((shards / "0.tar").read_bytes()))
    with fsspec.open("memory://resume/b.tar", "wb") as file:
        file.write((shards / "3.tar").read_bytes())
    for pattern in (str(tmp_path / "a.tar.gz"), "memory://resume/b.tar"):
        check_exact([3], shards=pattern, tokenizer_dir=tokenizer_dir, model=micro)


def test_passing_over_decodes_nothing(
    shards: Path, tokenizer_dir: str, micro: ClapConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    decode = shard_reader.decode_audio
    monkeypatch.setattr(
        shard_reader, "decode_audio", lambda *args, **kwargs: (decoded.append(1), decode(*args, **kwargs))[1]
    )
    arguments: dict[str, Any] = {
        "shards": str(shards / "{0..2}.tar"), "tokenizer_dir": tokenizer_dir, "model": micro, "micro_batch": 2
    }  # fmt: skip
    with open_source(**arguments) as source:
        for _ in range(10):
            next(source)
        state = source.state()
    decoded.clear()
    with open_source(**arguments, state=state) as source:
        next(source)
    assert 2 <= len(decoded) <= 6  # two rows, and broken items met on the way to them


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"world_size": 2}, "other ranks (then 1, now 2)"),
        ({"num_workers": 2}, "other workers per rank (then 1, now 2)"),
        ({"shuffle_buffer": 3}, "other clap.data.shuffle_buffer (then 9, now 3)"),
    ],
)
def test_another_setup_goes_on_in_a_new_order(
    tmp_path: Path,
    tokenizer_dir: str,
    micro: ClapConfig,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, int],
    told: str,
) -> None:
    for tar in range(4):
        write_tar(
            tmp_path / f"{tar}.tar",
            [member for item in range(10) for member in marked_item(10 * tar + item)],
        )
    arguments: dict[str, Any] = {"shards": str(tmp_path / "{0..3}.tar"), "tokenizer_dir": tokenizer_dir, "model": micro}
    with open_source(**arguments, micro_batch=4) as source:
        first = [number_of(row) for _ in range(5) for row in next(source).waveforms]
        state = source.state()
    with open_source(**arguments, micro_batch=4, **changes) as source:
        afresh = [number_of(row) for _ in range(5) for row in next(source).waveforms]
    capsys.readouterr()
    with open_source(**arguments, micro_batch=4, **changes, state=state) as source:
        resumed = [number_of(row) for _ in range(5) for row in next(source).waveforms]
        later = source.state()
        after = [number_of(row) for row in next(source).waveforms]
    told_lines = capsys.readouterr().err.splitlines()
    assert told_lines == [f"clap.data.shards: going on after 20 samples in a new order, because of {told}"]
    assert resumed not in (first, afresh)
    with open_source(**arguments, micro_batch=4, **changes, state=later) as source:
        assert [number_of(row) for row in next(source).waveforms] == after
    assert capsys.readouterr().err == ""


def test_synthetic_data_goes_on(micro: ClapConfig) -> None:
    def source(state: dict[str, Any] | None) -> BatchSource:
        return build_batches(
            SyntheticData(source="synthetic", num_batches=3),
            model=micro, text_tokens=12, micro_batch=2, rank=0, world_size=1, seed=0,
            device=torch.device("cpu"), state=state,
        )  # fmt: skip

    with source(None) as uninterrupted:
        batches = [next(uninterrupted) for _ in range(2)]
        state = uninterrupted.state()
        batches += [next(uninterrupted) for _ in range(3)]
    with source(state) as resumed:
        assert all(same(next(resumed), expected) for expected in batches[2:])


class CountedPieces:
    """A row with the number of the micro-batch it is in."""

    def __init__(self) -> None:
        self.num_given = 0

    def __next__(self) -> list[Batch]:
        self.num_given += 1
        ids = torch.ones(1, 4).long()
        return [Batch(torch.full((1, 8), float(self.num_given)), ids, ids).pin_memory()]

    def state(self) -> dict[str, Any]:
        return {"given": self.num_given}

    def statistics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_is_that_of_the_batch_handed_out_not_of_the_one_copied_ahead() -> None:
    pieces = CountedPieces()
    with BatchSource(pieces, torch.device("cuda"), copy_ahead=True) as source:
        assert source.state() == {"given": 0}
        for number in (1, 2, 3):
            assert next(source).waveforms[0, 0] == number
            assert source.state() == {"given": number}
            assert pieces.num_given == number + 1
