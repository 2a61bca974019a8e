from collections.abc import Callable
from itertools import combinations, islice

import pytest
import torch

from clap_ds.data.batch import Batch
from tests.data.conftest import OpenSource

Draw = Callable[..., list[Batch]]


@pytest.fixture
def draw(open_source: OpenSource) -> Draw:
    """The first batches of a source."""
    return lambda count=1, **settings: list(islice(open_source(**{"micro_batch": 6, **settings}), count))


def test_batches_are_the_same_for_a_seed_and_a_rank_alone(draw: Draw) -> None:
    """Wherever they are placed; batches take turns."""
    *batches, again = draw(4, num_batches=3)
    for first, second in zip(batches, draw(3, num_batches=3, placement="device"), strict=True):
        assert all(torch.equal(*pair) for pair in zip(first.tensors(), second.tensors(), strict=True))
    assert torch.equal(batches[0].audio, again.audio)
    batches += [draw(rank=rank, seed=seed)[0] for rank, seed in [(1, 0), (0, 1), (1, 2), (2, 1)]]
    for first, second in combinations(batches, 2):
        pairs = zip(first.tensors()[:2], second.tensors()[:2], strict=True)
        assert all(bool((ours != theirs).any(1).all()) for ours, theirs in pairs)
