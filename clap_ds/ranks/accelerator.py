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
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Literal

from clap_ds.config.errors import UserError, run_alone

DEVICE_FILES = "/dev/nvidia[0-9]*"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PCI_DEVICES = Path("/sys/bus/pci/devices")
OLDEST_DRIVER = {
    11: 450,
    12: 525,
    13: 580,
}  # by major version of CUDA (its release notes, "minor version compatibility")
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
    if are_hidden() or not are_there():
        if granted := granted_by_slurm():
            raise UserError(
                f"SLURM has granted this process GPUs ({granted}), and it sees none: look at CUDA_VISIBLE_DEVICES, the driver,"
                " and the container's options; DS_ACCELERATOR=cpu runs on the CPUs all the same"
            )
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return "cpu"
    raise UserError(
        f"this machine has a GPU that torch can't use: {_why(torch.__version__, torch.version.cuda)}."
        " docs/cluster.md, “GPUs and drivers”, has more; DS_ACCELERATOR=cpu runs on the CPUs all the same"
    )


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


def are_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU: it begins with nothing, a negative number or SLURM's `NoDevFiles`."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return first in ("", "NoDevFiles") or first.startswith("-")


def granted_by_slurm() -> str:
    """The variable by which SLURM says that this process has GPUs, with its value; empty without GPUs, and without SLURM."""
    nothing = {
        "SLURM_STEP_GPUS": "",
        "SLURM_JOB_GPUS": "",
        "SLURM_GPUS_ON_NODE": "0",
    }  # the others are lists of numbers
    found = {name: os.environ.get(name) or nothing[name] for name in nothing}
    return next((f"{name}={value}" for name, value in found.items() if value != nothing[name]), "")


def are_there() -> bool:
    """Whether this process has a GPU: one it may open, one that nvidia-smi lists, or, where nvidia-smi is installed and fails,
    one on the PCI bus. By itself the bus proves nothing: a container shows its host's.
    """
    if any(os.access(path, os.R_OK | os.W_OK) for path in glob.glob(DEVICE_FILES)) or nvidia_smi():
        return True
    return shutil.which("nvidia-smi") is not None and any(map(_is_gpu, PCI_DEVICES.glob("*")))


def _is_gpu(device: Path) -> bool:
    with contextlib.suppress(OSError):
        return (device / "vendor").read_text()[:6] == "0x10de" and (device / "class").read_text()[:4] == "0x03"
    return False


def nvidia_smi(query: str = "--query-gpu=name,memory.total,driver_version") -> list[str]:
    """Lines that nvidia-smi answers a query with, by default one for each GPU; empty where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.splitlines() if line.count(",") >= query.count(",")]


def driver_version() -> str | None:
    """Version of the NVIDIA driver that runs, such as 550.54.15; None where none does."""
    with contextlib.suppress(OSError):
        if found := re.search(r"Kernel Module.*?\s(\d+\.[\d.]*\d)\s", DRIVER_FILE.read_text()):
            return found[1]
    return next((line.rpartition(",")[2].strip() for line in nvidia_smi()), None)


def is_too_old(driver: str, cuda: str) -> bool:
    """Whether a torch built for this CUDA can't run on this driver."""
    return int(driver.partition(".")[0]) < OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0)


def torch_cuda() -> tuple[str | None, str | None]:
    """Version of the torch that is installed and of the CUDA it was built for, without importing it; None for what isn't."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if path is None or not path.exists():
        return None, None
    found = dict(re.findall(r"^(__version__|cuda)\b.*= '([^']*)'", path.read_text(), re.MULTILINE))
    return found.get("__version__"), found.get("cuda")


def _why(torch_version: str, cuda: str | None) -> str:
    driver = driver_version()
    if cuda is None:
        return f"torch {torch_version} is built without CUDA (the driver is {driver or 'not running'})"
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    built = f"torch {torch_version} is built for CUDA {cuda}" + (f", which needs driver ≥ {oldest}" if oldest else "")
    if driver is None:
        return f"no NVIDIA driver is running; {built}"
    if is_too_old(driver, cuda):
        return f"driver {driver} is too old: {built}"
    import torch

    reason = "nothing"
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error).splitlines()[0]
    return f"driver {driver}; {built}; torch says: {reason}"


if __name__ == "__main__":
    run_alone(lambda: print(choose_accelerator()))
