import pytest
import torch

from clap_ds.data.batch import Batch, LoaderThroughput, describe, join
from clap_ds.data.shard_io import Kind

CPU = torch.device("cpu")


def random_batch(num_rows: int, seed: int, num_audio_samples: int = 50) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(num_rows, 7, generator=generator) < 0.5).long()
    ids = torch.randint(0, 99, (num_rows, 7), generator=generator)
    return Batch(torch.rand(num_rows, num_audio_samples, generator=generator), ids, mask)


def assert_equal(batch: Batch, expected: Batch) -> None:
    for tensor, expected_tensor in zip(batch.tensors(), expected.tensors(), strict=True):
        assert tensor.dtype == expected_tensor.dtype
        assert torch.equal(tensor.cpu(), expected_tensor.cpu())
    assert batch.num_tokens == expected.num_tokens


def test_join_puts_pieces_together_in_order() -> None:
    whole = random_batch(10, seed=0)
    assert_equal(join([whole.rows(0, 3), whole.rows(3, 4), whole.rows(4, 10)], CPU), whole)
    alone = join([whole], CPU)
    assert_equal(alone, whole)
    assert alone.audio.data_ptr() != whole.audio.data_ptr(), "shares memory that workers reuse"
    assert whole.num_tokens == whole.attention_mask.sum()
    shorts = whole.rows(0, 1)
    halves = whole.rows(1, 2)
    shorts.audio = torch.tensor([[-(2**15), 2**14]], dtype=torch.int16)
    halves.audio = torch.tensor([[0.5, -2]]).half()
    for piece, dtype in ((shorts, torch.int16), (halves, torch.float32)):
        joined = [join([piece], CPU).audio, join([piece, piece], CPU).audio[:1]]
        assert [(audio.dtype, audio.tolist()) for audio in joined] == [
            (dtype, piece.audio.tolist())
        ] * 2


def test_pieces_are_packed_together() -> None:
    """A batch of two pieces has its real tokens in order as packed captions, and still its padded
    form."""
    ids = torch.tensor([[0, 5, 2, 1], [0, 2, 1, 1], [0, 6, 7, 2]])
    mask = (ids != 1).long()
    pieces = [
        Batch(torch.zeros(2, 8), ids[:2], mask[:2]),
        Batch(torch.zeros(1, 8), ids[2:], mask[2:]),
    ]
    batch = join(pieces, CPU, pack_captions=True)
    waveforms, row, no_mask, packing = batch.model_inputs()
    assert waveforms.shape == (3, 8)
    assert no_mask is None
    assert row[: batch.num_tokens].tolist() == [0, 5, 2, 0, 2, 0, 6, 7, 2]
    assert packing.cu_seqlens[:4].tolist() == [0, 3, 5, 9]
    assert len(row) == packing.cu_seqlens[-1] == 16
    assert torch.equal(batch.input_ids, ids)
    assert join(pieces, CPU).model_inputs()[1].shape == (3, 4)
    assert join(pieces[1:], CPU).model_inputs()[2] is None  # full captions
    again = [join(pieces[:1], CPU, pack_captions=True).model_inputs()[1] for _ in range(2)]
    assert again[0][:5].tolist() == [0, 5, 2, 0, 2]
    assert again[0] is again[1]


@pytest.mark.parametrize(
    ("throughput", "needed", "said"),
    [
        (
            (1000.0, 4, "encoded"),
            800.0,
            "can load 1,000 clips/s, their rank's step needs 800: enough",
        ),
        ((1000.0, 4, "encoded"), 900.0, ": margin below 25%. Set clap.data.num_workers to 5"),
        ((1000.0, 4, "encoded"), 2000.0, "Set clap.data.num_workers to 10; prepared"),
        ((1000.0, 4, "waveform"), 3000.0, "more than this host's 22 cores for 2 rank(s)"),
        ((50.0, 0, "encoded"), 25.0, "makes each step 50% longer"),
    ],
)
def test_verdict(throughput: tuple[float, int, Kind], needed: float, said: str) -> None:
    assert said in describe(LoaderThroughput(*throughput), needed, ranks_per_host=2, cores=22)
