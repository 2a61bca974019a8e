from typing import Any

import pytest
import torch

from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource
from tests.data.test_batch import CPU, assert_equal, random_batch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class RecordedStream:
    """Return the given micro-batches, count them, and record closing."""

    def __init__(self, micro_batches: list[list[Batch]]) -> None:
        self.micro_batches = iter(micro_batches)
        self.num_given = 0
        self.is_closed = False

    def __next__(self) -> list[Batch]:
        self.num_given += 1
        return next(self.micro_batches)

    def close(self) -> None:
        self.is_closed = True

    def state(self) -> dict[str, Any]:
        return {"given": self.num_given}


def test_a_source_is_closed_when_the_step_fails() -> None:
    pieces = RecordedStream([[random_batch(4, seed=2)]])
    source = BatchSource(pieces, CPU, copy_ahead=False)
    assert not pieces.is_closed
    with pytest.raises(RuntimeError, match="the step"), source:
        raise RuntimeError("the step")
    assert pieces.is_closed


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, needs_gpu])]
)
def test_looking_ahead_takes_nothing(device: torch.device) -> None:
    batches = [random_batch(4, seed) for seed in range(4)]
    with BatchSource(
        RecordedStream([[each] for each in batches]), device, copy_ahead=device.type == "cuda"
    ) as source:
        for number, batch in enumerate(batches[:3]):
            assert_equal(source.peek().to(CPU), batch)
            assert source.state() == {"given": number}
            assert_equal(next(source).to(CPU), batch)
            assert source.state() == {"given": number + 1}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_batches_copied_ahead_are_complete(num_pieces: int) -> None:
    """With a busy compute stream, a missing wait or memory reused too early would give wrong rows
    of large batches.

    The state is that of the returned batch, not of the one copied ahead.
    """
    device = torch.device("cuda")
    size = 96 // num_pieces
    expected = [random_batch(96, seed, num_audio_samples=200_000) for seed in range(6)]
    starts = range(0, 96, size)
    given = [*expected, expected[0]]
    pieces = [[batch.rows(start, start + size).pin_memory() for start in starts] for batch in given]
    work = torch.rand(4096, 4096, device=device)
    sums = []
    with BatchSource(RecordedStream(pieces), device, copy_ahead=True) as source:
        for number in range(len(expected)):
            assert source.state() == {"given": number}
            batch = next(source)
            for _ in range(20):
                work = (work @ work).clamp_(0, 1)
            sums.append((batch.audio.double().sum(1), batch.input_ids.sum(1), batch.num_tokens))
            del batch
    torch.cuda.synchronize()
    for (waveform_sums, id_sums, num_tokens), batch in zip(sums, expected, strict=True):
        torch.testing.assert_close(waveform_sums.cpu(), batch.audio.double().sum(1))
        assert torch.equal(id_sums.cpu(), batch.input_ids.sum(1))
        assert num_tokens == batch.num_tokens
