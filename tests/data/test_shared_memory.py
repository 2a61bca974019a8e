import pytest
import torch

from clap_ds.data.shared_memory import lock_pages, shared_empty, unlock_pages


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_copies_from_locked_pages() -> None:
    memory = shared_empty((3, 100_000), torch.int16)
    assert not memory.is_pinned()
    assert lock_pages(memory)
    try:
        assert memory[1].is_pinned()
        memory[1] = 7
        assert (memory[1].to("cuda", non_blocking=True) == 7).all()
        assert not lock_pages(memory), "twice"
        assert (torch.ones(9, device="cuda") == 1).all(), "CUDA's error is gone"
    finally:
        unlock_pages(memory)
