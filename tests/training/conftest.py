"""A single rank for tests of training."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A process with a gloo group of its own."""
    pool = RankPool(1)
    yield pool
    pool.close()
