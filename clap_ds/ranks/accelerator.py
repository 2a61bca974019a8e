"""GPU or CPU: what a process of this project computes on, and why not on a GPU that is there.

Where the driver is older than torch's CUDA, or torch is a build without CUDA, `torch.cuda.is_available()` is just false, and
a run would go on on the CPUs, hundreds of times slower. Here that is an error. The CPUs are used without asking where the
machine has no NVIDIA GPU, where `DS_ACCELERATOR=cpu` (DeepSpeed's own variable) wants them, and where `CUDA_VISIBLE_DEVICES`
hides every GPU. The latter says something of a single process alone: the deepspeed launcher sets it anew for its ranks.

    python -m clap_ds.ranks.accelerator     prints cuda or cpu; an error and exit code 2 where a GPU can't be used

Top-level imports: standard library only, for hosts are asked, too, whose Python may lack the rest.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clap_ds.config.errors import UserError, run_alone

if TYPE_CHECKING:
    import torch

DEVICE_FILES = "/dev/nvidia[0-9]*"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PCI_DEVICES = Path("/sys/bus/pci/devices")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def choose_accelerator() -> Literal["cuda", "cpu"]:
    """What this process computes on, and DeepSpeed, which chooses while it is imported and warns of a machine without GPUs.

    Raises:
        UserError: the machine has a GPU, or SLURM says so, nobody asked for the CPUs, and torch can't use it; why, and what to
            do.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return "cpu"
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError(f"{sys.executable} has no torch: `make setup` makes .venv, which has it") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an old driver, once a rank
        if torch.cuda.is_available():
            return "cuda"
    if not _is_hidden() and is_there():
        raise UserError(
            f"this machine has a GPU that torch can't use: {_why()}."
            " docs/cluster.md, “GPUs and drivers”, has more; DS_ACCELERATOR=cpu runs on the CPUs all the same"
        )
    if granted := granted_by_slurm():
        raise UserError(
            f"SLURM has granted this process GPUs ({granted}), and it sees none: look at CUDA_VISIBLE_DEVICES, the driver,"
            " and the container's options; DS_ACCELERATOR=cpu runs on the CPUs all the same"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return "cpu"


def choose_device(rank: int, local_rank: int, *, cuda_graphs: bool) -> torch.device:
    """This rank's device, set up; a UserError where its host has fewer GPUs than ranks, or one that torch can't use."""
    import torch

    if choose_accelerator() == "cpu":
        return torch.device("cpu")
    number, there = local_rank, torch.cuda.device_count()
    if there == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
        number = 0  # it was given one of its own (`--gpus-per-task`); DeepSpeed's launcher names those of all ranks
    if number >= there:
        raise UserError(
            f"rank {rank} is number {number} on {os.uname().nodename}, which has {there} visible GPUs;"
            " the hostfile promises more slots than there are"
        )
    set_up_cuda(cuda_graphs=cuda_graphs)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def set_up_cuda(*, cuda_graphs: bool = False) -> None:
    """Set what this project wants otherwise than torch does. Call before anything is allocated on a GPU.

    - Attention never by cuDNN: since torch 2.11 its backward gives NaN for some masked lengths (pytorch issue 196678), and it
      takes a bias only where that needs no gradient, so cached accumulation's two passes would go by different kernels.
    - The allocator's segments grow (`expandable_segments`) where they would otherwise be joined by others: less memory is lost
      between tensors as caption lengths change. Not with CUDA graphs, with which NCCL's registration of buffers hung (pytorch
      issue 158029), and not where the user has set the allocator by a variable of torch's.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    if not cuda_graphs and not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        # Versions of torch that don't have the first name have the second, which others warn of.
        own = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (own or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _is_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU: it begins with nothing, a negative number or SLURM's `NoDevFiles`."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return first in ("", "NoDevFiles") or first.startswith("-")


def granted_by_slurm() -> str:
    """The variable by which SLURM says that this process has GPUs, with its value; empty without GPUs, and without SLURM."""
    names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")  # lists, but for the last, which counts
    found = {name: os.environ.get(name, "") for name in names}
    return next((f"{name}={value}" for name, value in found.items() if value and (name, value) != (names[-1], "0")), "")


def is_there() -> bool:
    """Whether this process has a GPU: one it may open, one that nvidia-smi lists, or, where nvidia-smi is installed and fails,
    a device of NVIDIA's on the PCI bus. By itself the bus proves nothing: a container shows its host's.
    """
    if any(os.access(path, os.R_OK | os.W_OK) for path in glob.glob(DEVICE_FILES)) or nvidia_smi():
        return True
    on_bus = (path.read_text().startswith("0x10de") for path in PCI_DEVICES.glob("*/vendor"))
    return shutil.which("nvidia-smi") is not None and any(on_bus)


def nvidia_smi(query: str = "--query-gpu=name,memory.total,driver_version") -> list[str]:
    """Lines that nvidia-smi answers a query with, by default one for each GPU; empty where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.splitlines() if line.count(",") >= query.count(",")]


def _why() -> str:
    """What runs of driver and torch, and what torch says of a GPU that it can't use."""
    import torch

    driver = next((line.rpartition(",")[2].strip() for line in nvidia_smi()), "not running")
    with contextlib.suppress(OSError):
        driver = next(iter(re.findall(r"Kernel Module.*?\s(\d+\.[\d.]*\d)\s", DRIVER_FILE.read_text())), driver)
    said = "nothing"
    try:
        torch.cuda.init()
    except Exception as error:
        said = str(error).strip().splitlines()[0].rstrip(".")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"the driver is {driver}, torch {torch.__version__} is {built}; torch says: {said}"


if __name__ == "__main__":
    run_alone(lambda: print(choose_accelerator()))
