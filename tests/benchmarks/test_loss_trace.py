"""The contrastive loss as traced for a GPU at the published runs' largest scale."""

from benchmarks import loss_trace


def test_loss_of_512_ranks_is_few_kernels_and_little_traffic() -> None:
    found = loss_trace.measure("exact_local", 512, 616, 512)
    assert 100 < found["kernels"] < 200
    assert 9 < found["gigabytes"] < 10.5
    # Six products of 616 rows, all columns and 512 dimensions: two of each tower for the sums, four for the gradients.
    assert found["teraflops"] == 6 * 2 * 616 * 512 * 616 * 512 / 1e12
    # Of that the gathered features in bf16 are 646 MB.
    assert found["peak_mb"] < 646 + 150
