"""The search for a micro-batch against memory that grows in known ways, and parts that add up."""

import pytest

from clap_ds.planning.memory import CONTEXT_GIB, FRAGMENTATION, GIB, NCCL_GIB, largest_micro_batch, memory_parts
from clap_ds.planning.step import Step
from clap_ds.planning.trace import Recorded


@pytest.mark.parametrize(("start", "limit", "expected"), [(616, 80, 768), (8, 80, 768), (616, 3, 8), (616, 2.5, None)])
def test_largest_micro_batch_where_memory_is_linear(start: int, limit: float, expected: int | None) -> None:
    tried: list[int] = []

    def peak_gib(size: int) -> float:
        tried.append(size)
        return 2 + size * 0.1015625

    assert largest_micro_batch(peak_gib, start, 2, limit) == expected
    assert len(tried) <= 2


def test_a_peak_that_bends_is_found_too() -> None:
    """Below 400 something that doesn't grow is larger than what does."""
    found = largest_micro_batch(lambda size: max(40.0, 0.1 * size), 256, 30, 60)
    assert found == 600
    assert largest_micro_batch(lambda size: max(40.0, 0.1 * size), 8, 40, 60) == 600
    assert largest_micro_batch(lambda size: 0.1 * size + 1e-5 * size**2, 64, 0, 80) in range(728, 745)


def test_parts_of_memory_add_up() -> None:
    recorded = Recorded(at_peak={("audio", False): 3 * GIB, ("audio", True): GIB, ("weights", False): GIB})
    step = Step(recorded, 8, 1, False, 100)
    parts = memory_parts(step, 1, loss_bytes=GIB)
    assert (parts["audio activations"], parts["weights"], parts["loss"]) == (4, 1, 1)
    assert sum(parts.values()) == pytest.approx(6 * (1 + FRAGMENTATION) + CONTEXT_GIB)
    assert sum(memory_parts(step, 2).values()) == pytest.approx(5 * (1 + FRAGMENTATION) + CONTEXT_GIB + NCCL_GIB)
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
