import pytest
import torch

from clap_ds.data.batch import Batch, LoaderThroughput, describe, join

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
    assert batch.num_tokens == expected.num_tokens == expected.attention_mask.sum()


def test_join_keeps_rows_in_order_without_sharing_audio():
    whole = random_batch(10, seed=0)
    assert_equal(join([whole.rows(0, 3), whole.rows(3, 4), whole.rows(4, 10)], CPU), whole)
    single = join([whole], CPU)
    assert_equal(single, whole)
    assert single.audio.data_ptr() != whole.audio.data_ptr()


def test_join_with_packing_has_real_tokens_in_order():
    whole = random_batch(3, seed=0)
    batch = join([whole.rows(0, 2), whole.rows(2, 3)], CPU, pack_captions=True)
    _, tokens, mask, _ = batch.model_inputs()
    assert mask is None
    real_tokens = whole.input_ids[whole.attention_mask.bool()]
    assert torch.equal(tokens[: batch.num_tokens], real_tokens)


@pytest.mark.parametrize(
    ("throughput", "needed", "report"),
    [
        ((1000.0, 4, "encoded"), 800.0, "1,000 clips/s, their rank's step needs 800: enough"),
        ((1000.0, 4, "encoded"), 900.0, ": margin below 25%. Set clap.data.num_workers to 5"),
        (
            (1000.0, 4, "waveform"),
            3000.0,
            "num_workers to 15, which is more than this host's 22 cores",
        ),
        ((50.0, 0, "encoded"), 25.0, "makes each step 50% longer"),
    ],
)
def test_describe_throughput_advises_num_workers(throughput, needed, report):
    assert report in describe(LoaderThroughput(*throughput), needed, ranks_per_host=2, cores=22)
