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
        self.is_closed = False

    def __next__(self) -> list[Batch]:
        self.num_batches += 1
        return next(self.micro_batches)

    def close(self) -> None:
        self.is_closed = True

    def state(self) -> dict[str, Any]:
        return {"batches": self.num_batches}


def test_source_is_closed_if_step_fails() -> None:
    stream = FakeStream([])
    source = BatchSource(stream, CPU, copy_ahead=False)
    with pytest.raises(RuntimeError, match="the step"), source:
        raise RuntimeError("the step")
    assert stream.is_closed


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


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_batches_copied_ahead_are_complete(num_pieces: int) -> None:
    """With a busy compute stream, a missing wait or memory reused too early would give wrong rows
    of large batches."""
    device = torch.device("cuda")
    piece_rows = 96 // num_pieces
    batches = [random_batch(96, seed, num_audio_samples=200_000) for seed in range(6)]
    micro_batches = []
    # One more is copied ahead.
    for batch in [*batches, batches[0]]:
        starts = range(0, 96, piece_rows)
        pieces = [batch.rows(start, start + piece_rows).pin_memory() for start in starts]
        micro_batches.append(pieces)
    work = torch.rand(4096, 4096, device=device)
    sums = []
    with BatchSource(FakeStream(micro_batches), device, copy_ahead=True) as source:
        for _ in batches:
            batch = next(source)
            for _ in range(20):
                work = (work @ work).clamp_(0, 1)
            sums.append((batch.audio.double().sum(1), batch.input_ids.sum(1)))
            del batch
    for (audio_sums, id_sums), batch in zip(sums, batches, strict=True):
        torch.testing.assert_close(audio_sums.cpu(), batch.audio.double().sum(1))
        assert torch.equal(id_sums.cpu(), batch.input_ids.sum(1))
