"""Test that interrupted and uninterrupted runs see the same samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.conftest import OpenSource
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


MIXTURE = {"{0,1}.tar": 3.0, "{2,3}.tar": 1.0}


@pytest.mark.parametrize(
    ("names", "stops", "settings"),
    [
        ("*.tar", [0, 6, 13], {"micro_batch": 5, "shuffle_buffer": 9}),
        ("*.tar", [1, 6], {"micro_batch": 40, "num_workers": 2}),  # cuts pieces of 32
        (MIXTURE, [1, 7], {"num_workers": 2, "resampled": False, "shuffle_buffer": 9}),
        (MIXTURE, [1, 7], {"num_workers": 2, "resampled": True, "shuffle_buffer": 9}),
        (None, [2], {"num_batches": 3}),  # synthetic data
    ],
)
def test_interrupted_equals_uninterrupted(
    shards: Path, open_source: OpenSource, names: Any, stops: list[int], settings: dict[str, Any]
) -> None:
    """Over several passes, with broken items and a truncated tar; the final states are equal,
    too."""
    if isinstance(names, dict):
        names = {str(shards / name): weight for name, weight in names.items()}
    elif names == "*.tar":
        names = str(shards / names)
    settings = {"micro_batch": 20, **settings}
    with open_source(names, **settings) as source:
        states = [source.state()]
        expected = []
        for _ in range(NUM_BATCHES):
            expected.append(next(source))
            states.append(source.state())
    assert not torch.equal(expected[0].audio, expected[1].audio)
    for stop in stops:
        with open_source(names, states[stop], **settings) as source:
            for number in range(stop, NUM_BATCHES):
                pairs = zip(next(source).tensors(), expected[number].tensors(), strict=True)
                assert all(torch.equal(*pair) for pair in pairs), (stop, number)
            assert source.state() == states[-1]


def test_another_setup_resumes_in_a_new_order(
    tmp_path: Path, open_source: OpenSource, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = marked_tars(tmp_path, 4, 10)
    changed = {"shuffle_buffer": 3, "num_workers": 2}
    with open_source(pattern, shuffle_buffer=9, world_size=2) as source:
        first = numbers_in(source, 5)
        state = source.state()
    with open_source(pattern, **changed) as source:
        afresh = numbers_in(source, 5)
    capsys.readouterr()
    with open_source(pattern, state, **changed) as source:
        resumed = numbers_in(source, 5)
        later = source.state()
        after = numbers_in(source, 1)
    said = "clap.data.shards: resuming after 40 samples in a new order, because these changed: ranks (then 2, now 1)"
    assert capsys.readouterr().err.startswith(
        f"{said}, workers per rank (then 1, now 2), clap.data.shuffle_buffer ("
    )
    assert resumed not in (first, afresh)
    with open_source(pattern, later, **changed) as source:
        assert numbers_in(source, 1) == after
    assert capsys.readouterr().err == ""


def test_moved_tars_resume_in_the_same_order(
    tmp_path: Path, open_source: OpenSource, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = marked_tars(tmp_path / "here", 4, 10)
    settings = {"shuffle_buffer": 9}
    with open_source(pattern, **settings) as source:
        numbers_in(source, 3)
        state = source.state()
        following = numbers_in(source, 5)
    (tmp_path / "here").rename(tmp_path / "there")
    with open_source(f"{tmp_path}/there/*.tar", state, **settings) as source:
        assert numbers_in(source, 5) == following
    assert capsys.readouterr().err == ""
