"""The memory of the contrastive loss as the benchmark measures it, and its work as traced for the largest published scale."""

from unittest.mock import Mock

import pytest
import torch

from benchmarks import loss_bench
from tests.processes import warm_context

CPU = torch.device("cpu")


def test_memory_is_in_proportion_to_the_tile_not_to_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_bench, "multiprocessing", Mock(get_context=Mock(return_value=warm_context())))
    rows = [loss_bench.measure((size, 64), 1, CPU, torch.float32) for size in (8192, 16384)]
    first, second = (row["exact_local"]["peak_mb"] for row in rows)
    assert second < 1.2 * first
    assert rows[1]["gather_with_gradient"]["peak_mb"] > 1.8 * rows[0]["gather_with_gradient"]["peak_mb"]


def test_loss_of_512_ranks_is_few_kernels_and_little_traffic() -> None:
    found = loss_bench.traced("exact_local", 512, 616, 512)
    assert 100 < found["kernels"] < 200
    assert 9 < found["gigabytes"] < 10.5
    assert found["passes"] == pytest.approx(1e9 * found["gigabytes"] / (2 * 4 * 512 * 616 * 616))
    # Six products of 616 rows, all columns and 512 dimensions: two of each tower for the sums, four for the gradients.
    assert found["teraflops"] == 6 * 2 * 616 * 512 * 616 * 512 / 1e12
    # Of that the gathered features in bf16 are 646 MB.
    assert found["peak_mb"] < 646 + 150
