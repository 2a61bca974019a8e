"""Test that interrupted and uninterrupted runs see the same samples."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.tars import marked_tars, numbers_in, wav, write_tar

NUM_BATCHES = 14


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 4 tars of 13 items with several captions, longer than a clip, so that crops are random;
    some are broken."""
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


def all_tars(folder: Path) -> str:
    return f"{folder}/*.tar"


def mixture(folder: Path) -> dict[str, float]:
    return {f"{folder}/{{0,1}}.tar": 3.0, f"{folder}/{{2,3}}.tar": 1.0}


@pytest.mark.parametrize(
    ("patterns_in", "stops", "settings"),
    [
        (all_tars, [0, 6, 13], {"micro_batch": 5, "shuffle_buffer": 9}),
        # Micro-batches end within chunks of 32.
        (all_tars, [1, 6], {"micro_batch": 40, "num_workers": 2}),
        (
            mixture,
            [1, 7],
            {"micro_batch": 20, "num_workers": 2, "resampled": True, "shuffle_buffer": 9},
        ),
    ],
)
def test_resumed_loader_equals_uninterrupted(
    tmp_path, shards, open_source, patterns_in, stops, settings
):
    """Over several passes, with broken items and a truncated tar; the final states are equal,
    too."""
    # Moved tars are read in the same order.
    moved = tmp_path / "moved"
    moved.symlink_to(shards)

    with open_source(patterns_in(shards), **settings) as source:
        states = [source.state()]
        batches = []
        for _ in range(NUM_BATCHES):
            batches.append(next(source))
            states.append(source.state())
    assert not torch.equal(batches[0].audio, batches[1].audio)
    for stop in stops:
        with open_source(patterns_in(moved), [states[stop]], **settings) as source:
            for number in range(stop, NUM_BATCHES):
                resumed = next(source).tensors()
                assert all(map(torch.equal, resumed, batches[number].tensors())), (stop, number)
            assert source.state() == states[-1]


def test_resuming_with_other_shards_begins_new_order(tmp_path, open_source, capsys):
    pattern = marked_tars(tmp_path, 4, 10)
    first_three = str(tmp_path / "{000..002}.tar")
    with open_source(pattern, shuffle_buffer=9) as source:
        numbers_in(source, 5)
        states = [source.state()]
    with open_source(first_three, shuffle_buffer=9) as source:
        new_numbers = numbers_in(source, 5)
    with open_source(first_three, states, shuffle_buffer=9) as source:
        assert numbers_in(source, 5) != new_numbers
    error = capsys.readouterr().err
    assert "resuming after 20 samples with a new epoch in a new order" in error
    assert "because these changed: shards (then" in error
