from collections.abc import Callable
from itertools import combinations, islice
from typing import Any

import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.data.batch import Batch
from tests.data.conftest import OpenSource

Draw = Callable[..., list[Batch]]


@pytest.fixture
def draw(open_source: OpenSource) -> Draw:
    """Return a function that draws the first batches of a source."""
    return lambda count=1, **settings: list(
        islice(open_source(**{"micro_batch": 6, **settings}), count)
    )


def test_batches_are_the_same_for_a_seed_and_a_rank_alone(draw: Draw) -> None:
    """For any placement; batches repeat in turn."""
    *batches, again = draw(4, num_batches=3)
    for first, second in zip(batches, draw(3, num_batches=3, placement="device"), strict=True):
        assert all(
            torch.equal(*pair) for pair in zip(first.tensors(), second.tensors(), strict=True)
        )
    assert torch.equal(batches[0].audio, again.audio)
    batches += [draw(rank=rank, seed=seed)[0] for rank, seed in [(1, 0), (0, 1), (1, 2), (2, 1)]]
    for first, second in combinations(batches, 2):
        pairs = zip(first.tensors()[:2], second.tensors()[:2], strict=True)
        assert all(bool((ours != theirs).any(1).all()) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("setting", "shares"),
    [
        (None, {12: 1.0}),
        (2, {2: 1.0}),
        ({"3": 1.0, "8": 6.0, "12": 3.0, "5": 0.0}, {3: 0.1, 8: 0.6, 12: 0.3}),
    ],
)
def test_captions_are_framed_as_roberta_frames_them(
    draw: Draw, micro: ClapConfig, setting: object, shares: dict[int, float]
) -> None:
    (batch,) = draw(micro_batch=2000, caption_lengths=setting)
    assert batch.input_ids.shape == batch.attention_mask.shape == (2000, 12)
    assert batch.input_ids.max() < micro.text.vocab_size
    lengths = batch.attention_mask.sum(1)
    assert set(lengths.tolist()) == set(shares)
    assert batch.num_tokens == lengths.sum()
    for length, share in shares.items():
        assert (
            abs((lengths == length).double().mean() - share)
            <= 5 * (share * (1 - share) / 2000) ** 0.5
        )  # 5 sigma
    for ids, length in zip(batch.input_ids[:50].tolist(), lengths.tolist(), strict=False):
        assert (ids[0], ids[length - 1], ids[length:]) == (0, 2, [1] * (12 - length))
        assert all(token > 3 for token in ids[1 : length - 1])


def test_workers_make_the_same_batches_and_go_on_where_a_run_resumes(
    draw: Draw, open_source: OpenSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clap_ds.data.synthetic.PIECE_SIZE", 4)  # pieces of 4 and 2 clips
    settings: dict[str, Any] = {
        "num_batches": 3,
        "caption_lengths": {"3": 1.0, "12": 1.0},
        "micro_batch": 6,
    }
    with open_source(num_workers=2, **settings) as source:
        found = [next(source) for _ in range(4)]
        state = source.state()
    with open_source(num_workers=2, state=state, **settings) as source:
        found += [next(source) for _ in range(3)]
    for ours, theirs in zip(found, draw(7, **settings), strict=True):
        assert all(
            torch.equal(*pair) for pair in zip(ours.tensors(), theirs.tensors(), strict=True)
        )
