"""Choose a rank's device, and change torch's defaults for CUDA."""

from __future__ import annotations

import os

import torch

from clap_ds.distributed.accelerator import choose_accelerator
from clap_ds.utils.errors import UserError


def choose_device(rank: int, local_rank: int) -> torch.device:
    """Return this rank's device, ready for use. Raises UserError if its host has too few GPUs or
    torch can't use them."""
    if choose_accelerator() == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    has_own_gpu = num_gpus == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    if has_own_gpu:  # srun --gpus-per-task
        local_rank = 0
        os.environ["LOCAL_RANK"] = "0"  # read by DeepSpeed's engine
    if local_rank >= num_gpus:
        host = os.uname().nodename
        raise UserError(
            f"rank {rank} needs GPU {local_rank} of {host}, which has {num_gpus} visible GPUs"
        )
    set_up_cuda()
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def set_up_cuda() -> None:
    """Change torch's CUDA defaults. Call before any GPU allocation."""
    # Since torch 2.11 its backward gives NaN for some masked lengths (pytorch issue 196678). It
    # takes a bias only if that needs no gradient, so cached accumulation's two passes would use
    # different kernels.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Otherwise cuBLAS may split long sums, such as weight gradients, and round the parts to 16
    # bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # Reduces fragmentation as caption lengths change. A user's own settings stay.
    if not any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
