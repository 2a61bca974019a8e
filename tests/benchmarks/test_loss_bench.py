"""The memory of the contrastive loss, as the loss benchmark measures it."""

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
