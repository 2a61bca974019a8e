"""Test the search for a micro-batch with known memory functions, and the sum of memory parts."""

from collections.abc import Callable

import pytest

from clap_ds.planning.memory import GIB, largest_micro_batch, memory_parts
from clap_ds.planning.step import Step
from clap_ds.planning.tracing import Recorded


@pytest.mark.parametrize(
    ("peak_gib", "start", "limit", "expected"),
    [(lambda size: 2 + size * 0.1015625, start, 80, 768) for start in (616, 8, 771, 2000)]
    + [
        (lambda size: 2 + size * 0.1015625, 616, limit, found)
        for limit, found in ((3, 8), (2.5, None))
    ]
    + [
        (lambda size: max(40.0, 0.1 * size), start, 60, 600) for start in (256, 8)
    ]  # below 400 something else is larger
    + [(lambda size: 0.1 * size + 1e-5 * size**2, 64, 80, 744)],
)
def test_largest_micro_batch(
    peak_gib: Callable[[int], float], start: int, limit: float, expected: int | None
) -> None:
    tried: list[int] = []
    assert (
        largest_micro_batch(lambda size: tried.append(size) or peak_gib(size), start, limit)
        == expected
    )
    assert len(tried) <= 7  # each takes a while


def test_parts_of_memory_add_up() -> None:
    recorded = Recorded()
    recorded.at_peak.update({"audio": 4 * GIB, "weights": GIB})
    step = Step(recorded, 1, 1, (1, 1), 100)
    parts = memory_parts(step, 2)
    assert (parts["audio activations"], parts["weights"]) == (4, 1)
    assert sum(parts.values()) == pytest.approx(
        5 * 1.016 + 0.7 + 0.8
    )  # as docs/estimation.md has them
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    assert sum(memory_parts(step, 1).values()) == pytest.approx(
        5 * 1.016 + 0.7
    )  # one rank has no NCCL buffers
