"""Choose GPU or CPU; fail if torch can't use a GPU that exists, as CPUs would be hundreds of times
slower.

    python -m clap_ds.distributed.accelerator     prints cuda or cpu

Top-level imports are standard library only: a host's Python may lack the rest.
"""

from __future__ import annotations

import glob
import os
import subprocess

from clap_ds.utils.errors import UserError, first_line, run_alone

DEVICE_FILES = "/dev/nvidia[0-9]*"
HIDE_ALL_GPUS = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""


def choose_accelerator() -> str:
    """Return `cuda` or `cpu`, and set it for DeepSpeed, which chooses at import.
    Raises UserError if this process has a GPU that torch can't use, unless CPUs were requested."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    gpu = find_gpu()
    problem = find_cuda_problem() if gpu else ""
    if problem:
        raise UserError(
            f"torch {torch.__version__} can't use this machine's GPU, {gpu}: {problem}"
            " See “GPUs and drivers” in docs/installation.md, or set DS_ACCELERATOR=cpu to run on CPUs"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return "cpu"


def find_gpu() -> str:
    """Return the evidence that this process has a GPU, a usable device file or SLURM's variable, or
    an empty string."""
    files = [path for path in glob.glob(DEVICE_FILES) if os.access(path, os.R_OK | os.W_OK)]
    if files and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in HIDE_ALL_GPUS:
        return min(files)
    count = os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    return f"SLURM_GPUS_ON_NODE={count}" if count != "0" else ""


def explain_no_gpu() -> str:
    """Return why torch has no GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in HIDE_ALL_GPUS:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}"
    return find_cuda_problem() or "torch lists none"


def find_cuda_problem() -> str:
    """Return why CUDA can't be initialized: torch without it, no driver, or one that is too old;
    empty if it can."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # names the driver's version
        return first_line(error)
    return ""


def nvidia_smi(query: str = "--query-gpu=name,memory.total,driver_version") -> list[str]:
    """Return nvidia-smi's lines for a query, by default one per GPU; empty if it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in done.stdout.splitlines()]
    # Messages of the driver have fewer columns.
    return [line for line in lines if line.count(",") >= query.count(",")]


if __name__ == "__main__":
    run_alone(lambda: print(choose_accelerator()))
