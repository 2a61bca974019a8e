"""GPU or CPU, and an error where torch can't use a GPU that is there: a run would go on on the CPUs, hundreds of times slower.

    python -m clap_ds.distributed.accelerator     prints cuda or cpu

Top-level imports: standard library only, for hosts are asked whose Python may lack the rest.
"""

from __future__ import annotations

import glob
import os
import subprocess
from typing import TYPE_CHECKING

from clap_ds.config.errors import UserError, run_alone

if TYPE_CHECKING:
    import torch

DEVICE_FILES = "/dev/nvidia[0-9]*"
CORES = len(os.sched_getaffinity(0))  # that this process may use


def choose_accelerator() -> str:
    """`cuda` or `cpu`, for this process and for DeepSpeed, which chooses while it is imported; a UserError where there is a GPU
    for this process, nobody asked for the CPUs, and torch can't use it."""
    asked = os.environ.get("DS_ACCELERATOR", "")
    if asked == "cpu":
        return "cpu"
    if asked not in ("", "cuda"):
        raise UserError(f"DS_ACCELERATOR={asked}: expected cuda or cpu")
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if found := find_gpu():
        try:
            torch.cuda.init()
        except Exception as error:  # names the driver's version
            raise UserError(
                f"this machine has a GPU that torch {torch.__version__} can't use: {found}: {str(error).splitlines()[0]}"
                " docs/cluster.md, “GPUs and drivers”, has more; DS_ACCELERATOR=cpu runs on the CPUs all the same"
            ) from None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return "cpu"


def choose_device(rank: int, local_rank: int) -> torch.device:
    """This rank's device, set up; a UserError where its host has fewer GPUs than ranks, or one that torch can't use."""
    import torch

    if choose_accelerator() == "cpu":
        return torch.device("cpu")
    number, there = local_rank, torch.cuda.device_count()
    if there == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
        number, os.environ["LOCAL_RANK"] = (
            0,
            "0",
        )  # its own (`--gpus-per-task`); DeepSpeed's engine goes by the variable
    if number >= there:
        raise UserError(f"rank {rank} is number {number} on {os.uname().nodename}, which has {there} visible GPUs")
    set_up_cuda()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def set_up_cuda() -> None:
    """Set what this project wants otherwise than torch does. Call before anything is allocated on a GPU."""
    import torch

    # Since torch 2.11 its backward gives NaN for some masked lengths (pytorch issue 196678). It takes a bias only where that
    # needs no gradient, so cached accumulation's two passes would go by different kernels.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Otherwise cuBLAS may split a long sum, as weights' gradients are, and round its parts to 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # Less memory is lost between tensors as caption lengths change.
    if not any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def find_gpu() -> str:
    """What says that this process has a GPU: a device file that it may open, or SLURM; else nothing."""
    files = [path for path in glob.glob(DEVICE_FILES) if os.access(path, os.R_OK | os.W_OK)]
    if files and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1", "NoDevFiles"):
        return min(files)
    count = os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    return f"SLURM_GPUS_ON_NODE={count}" if count != "0" else ""


def nvidia_smi(query: str = "--query-gpu=name,memory.total,driver_version") -> list[str]:
    """Lines that nvidia-smi answers a query with, by default one for each GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.splitlines() if line.count(",") >= query.count(",")]


if __name__ == "__main__":
    run_alone(lambda: print(choose_accelerator()))
