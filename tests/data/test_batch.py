from __future__ import annotations

from typing import Any

import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import SyntheticData
from clap_ds.data.batch import Batch, BatchSource, build_batches, join

CPU = torch.device("cpu")


def random_batch(num_rows: int, seed: int, num_audio_samples: int = 50) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(num_rows, 7, generator=generator) < 0.5).long()
    ids = torch.randint(0, 99, (num_rows, 7), generator=generator)
    return Batch(torch.rand(num_rows, num_audio_samples, generator=generator), ids, mask)


class RecordedPieces:
    """Hands out what it is given, and notes being closed."""

    def __init__(self, micro_batches: list[list[Batch]]) -> None:
        self.micro_batches = iter(micro_batches)
        self.num_closed = 0

    def __next__(self) -> list[Batch]:
        return next(self.micro_batches)

    def close(self) -> None:
        self.num_closed += 1

    def state(self) -> dict[str, Any]:
        return {}

    def statistics(self) -> dict[str, Any]:
        return {"num_broken_items": 3}


def assert_equal(batch: Batch, expected: Batch) -> None:
    for tensor, expected_tensor in zip(batch.tensors(), expected.tensors(), strict=True):
        assert torch.equal(tensor.cpu(), expected_tensor.cpu())
    assert batch.num_tokens == expected.num_tokens


def test_counts_rows_and_real_tokens() -> None:
    batch = Batch(torch.zeros(2, 10), torch.zeros(2, 4).long(), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]))
    assert (len(batch), batch.num_samples, batch.num_tokens) == (2, 2, 5)
    assert batch.rows(1, 2).num_tokens == 3


def test_join_puts_pieces_together_in_order() -> None:
    whole = random_batch(10, seed=0)
    pieces = [whole.rows(0, 3), whole.rows(3, 4), whole.rows(4, 10)]
    assert_equal(join(pieces, CPU), whole)


def test_moving_keeps_dtypes_and_values() -> None:
    batch = random_batch(3, seed=1)
    moved = batch.to(CPU)
    assert_equal(moved, batch)
    assert [tensor.dtype for tensor in moved.tensors()] == [torch.float32, torch.int64, torch.int64]


def test_source_closes_once_and_passes_statistics_on() -> None:
    pieces = RecordedPieces([[random_batch(4, seed=2)], [random_batch(4, seed=3)]])
    with BatchSource(pieces, CPU, copy_ahead=False) as source:
        assert_equal(next(source), random_batch(4, seed=2))
        assert source.statistics() == {"num_broken_items": 3}
        assert pieces.num_closed == 0
    source.close()
    assert pieces.num_closed == 1
    with pytest.raises(AssertionError, match="closed"):
        next(source)


def test_source_is_closed_when_the_step_fails() -> None:
    pieces = RecordedPieces([])
    with pytest.raises(RuntimeError, match="the step"), BatchSource(pieces, CPU, copy_ahead=False):
        raise RuntimeError("the step")
    assert pieces.num_closed == 1


def test_build_batches_gives_what_the_model_expects(micro: ClapConfig) -> None:
    with build_batches(
        SyntheticData(source="synthetic"),
        model=micro,
        text_tokens=12,
        micro_batch=5,
        rank=1,
        world_size=2,
        seed=0,
        device=CPU,
    ) as source:
        for _ in range(5):
            batch = next(source)
            assert batch.waveforms.shape == (5, 480)
            assert batch.waveforms.dtype == torch.float32
            assert batch.input_ids.shape == batch.attention_mask.shape == (5, 12)
            assert batch.num_tokens == 60


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_batches_copied_ahead_are_complete(num_pieces: int) -> None:
    """Large pinned batches under a busy compute stream: a missing wait, or memory reused too early, shows as wrong rows."""
    device = torch.device("cuda")
    expected = [random_batch(96, seed, num_audio_samples=200_000) for seed in range(6)]
    size = 96 // num_pieces
    pieces = [
        [batch.rows(start, start + size).pin_memory() for start in range(0, 96, size)]
        for batch in [*expected, expected[0]]
    ]
    work = torch.rand(4096, 4096, device=device)
    sums = []
    with BatchSource(RecordedPieces(pieces), device, copy_ahead=True) as source:
        for _ in expected:
            batch = next(source)
            for _ in range(20):
                work = (work @ work).clamp_(0, 1)
            sums.append((batch.waveforms.double().sum(1), batch.input_ids.sum(1), batch.num_tokens))
            del batch
    torch.cuda.synchronize()
    for (waveform_sums, id_sums, num_tokens), batch in zip(sums, expected, strict=True):
        torch.testing.assert_close(waveform_sums.cpu(), batch.waveforms.double().sum(1))
        assert torch.equal(id_sums.cpu(), batch.input_ids.sum(1))
        assert num_tokens == batch.num_tokens


def test_pieces_are_packed_together() -> None:
    """The packed captions of a batch of two pieces are the real tokens in order, and its padded form is still there."""
    ids = torch.tensor([[0, 5, 2, 1], [0, 2, 1, 1], [0, 6, 7, 2]])
    mask = (ids != 1).long()
    pieces = [Batch(torch.zeros(2, 8), ids[:2], mask[:2]), Batch(torch.zeros(1, 8), ids[2:], mask[2:])]
    batch = join(pieces, torch.device("cpu"), pack_captions=True)
    waveforms, row, no_mask, packing = batch.model_inputs()
    assert waveforms.shape == (3, 8)
    assert no_mask is None
    assert row[: batch.num_tokens].tolist() == [0, 5, 2, 0, 2, 0, 6, 7, 2]
    assert packing.bounds[:4].tolist() == [0, 3, 5, 9]
    assert len(row) == packing.bounds[-1] == 16
    assert torch.equal(batch.input_ids, ids)
    unpacked = join(pieces, torch.device("cpu"))
    assert unpacked.model_inputs()[1].shape == (3, 4)


def test_full_captions_have_no_mask() -> None:
    full = Batch(torch.zeros(1, 8), torch.tensor([[0, 5, 2]]), torch.ones(1, 3, dtype=torch.long))
    assert full.model_inputs()[2] is None
