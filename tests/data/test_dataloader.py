from typing import Any

import pytest
import torch

from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource
from tests.data.test_batch import CPU, assert_equal, random_batch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class FakeStream:
    """Micro-batches that are counted in the state."""

    def __init__(self, micro_batches: list[list[Batch]]) -> None:
        self.micro_batches = iter(micro_batches)
        self.num_batches = 0

    def __next__(self) -> list[Batch]:
        self.num_batches += 1
        return next(self.micro_batches)

    def close(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"batches": self.num_batches}


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, needs_gpu])]
)
def test_peek_takes_no_batch(device: torch.device) -> None:
    batches = [random_batch(4, seed) for seed in range(4)]
    stream = FakeStream([[batch] for batch in batches])
    with BatchSource(stream, device, copy_ahead=device.type == "cuda") as source:
        for number, batch in enumerate(batches[:3]):
            assert_equal(source.peek().to(CPU), batch)
            assert source.state() == {"batches": number}
            assert_equal(next(source).to(CPU), batch)
            assert source.state() == {"batches": number + 1}
