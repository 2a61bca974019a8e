"""GPU, CPU or another accelerator: what a process of this project computes on, and why not on a GPU that is there.

Where the driver is older than torch's CUDA, or torch is a build without CUDA, `torch.cuda.is_available()` is just false, and
a run would go on on the CPUs, hundreds of times slower. Here that is an error. The CPUs are used without asking where the
machine has no NVIDIA GPU, where `DS_ACCELERATOR=cpu` (DeepSpeed's own variable) wants them, and where `CUDA_VISIBLE_DEVICES`
hides every GPU. The latter says something of a single process alone: the deepspeed launcher sets it anew for its ranks.
`DS_ACCELERATOR=xpu` or `npu` takes that accelerator of DeepSpeed's; ROCm's is cuda.

    python -m clap_ds.ranks.accelerator     prints cuda, cpu or such a name; an error and exit code 2 where a GPU can't be used

Top-level imports: standard library only, for hosts are asked, too, whose Python may lack the rest.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from typing import TYPE_CHECKING, Any

from clap_ds.config.errors import UserError, run_alone

if TYPE_CHECKING:
    import torch

DEVICE_FILES = "/dev/nvidia[0-9]*"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CORES = len(os.sched_getaffinity(0))  # that this process may use, before `stay_near`


def choose_accelerator() -> str:
    """What this process computes on, and DeepSpeed, which chooses while it is imported and warns of a machine without GPUs.

    Raises:
        UserError: there is a GPU for this process, nobody asked for the CPUs, and torch can't use it; why, and what to do.
            Or DeepSpeed can't use the accelerator that `DS_ACCELERATOR` names.
    """
    asked = os.environ.get("DS_ACCELERATOR", "")
    if asked == "cpu":
        return "cpu"
    if asked not in ("", "cuda"):
        try:
            from deepspeed.accelerator import get_accelerator

            return str(get_accelerator().device_name())
        except (ValueError, ImportError) as error:
            raise UserError(f"DS_ACCELERATOR={asked}: {error}") from None
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError(f"{sys.executable} has no torch: `make setup` makes .venv, which has it") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an old driver, once a rank
        if torch.cuda.is_available():
            return "cuda"
    if found := find_gpu():
        try:
            torch.cuda.init()
            said = "nothing"
        except Exception as error:
            said = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"this machine has a GPU that torch can't use: {found}. torch {torch.__version__} (CUDA {torch.version.cuda})"
            f" says: {said}. docs/cluster.md, “GPUs and drivers”, has more; DS_ACCELERATOR=cpu runs on the CPUs all the same"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return "cpu"


def choose_device(rank: int, local_rank: int) -> torch.device:
    """This rank's device, set up; a UserError where its host has fewer GPUs than ranks, or one that torch can't use."""
    import torch

    kind = choose_accelerator()
    if kind == "cpu":
        return torch.device("cpu")
    from deepspeed.accelerator import get_accelerator

    its = get_accelerator()
    number, there = local_rank, its.device_count()
    if there == 1 and "," not in os.environ.get(its.visible_devices_envs()[0], ","):
        # It was given one of its own (`--gpus-per-task`), as DeepSpeed's engine has to know, which goes by the variable;
        # DeepSpeed's launcher names those of all ranks.
        number, os.environ["LOCAL_RANK"] = 0, "0"
    if number >= there:
        raise UserError(
            f"rank {rank} is number {number} on {os.uname().nodename}, which has {there} visible GPUs;"
            " the hostfile promises more slots than there are"
        )
    if kind == "cuda":
        set_up_cuda()
        stay_near(number)
    its.set_device(number)
    return torch.device(kind, number)


def set_up_cuda() -> None:
    """Set what this project wants otherwise than torch does. Call before anything is allocated on a GPU.

    - Attention never by cuDNN: since torch 2.11 its backward gives NaN for some masked lengths (pytorch issue 196678), and it
      takes a bias only where that needs no gradient, so cached accumulation's two passes would go by different kernels.
    - Products of 16-bit matrices are summed in fp32 throughout: cuBLAS may else split a long sum, as weights' gradients are
      (over millions of tokens), and round its parts to 16 bits before it adds them.
    - The allocator's segments grow (`expandable_segments`): less memory is lost between tensors as caption lengths change. Not
      where the user has set the allocator by a variable of torch's.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        # Versions of torch that don't have the first name have the second, which others warn of.
        own = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (own or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def stay_near(gpu: int) -> None:
    """Have this thread, and what it starts later, run on the cores near a GPU: memory is taken near who first writes to it.
    Not where this process may use only some of the host's cores, or NVML doesn't know which are near."""
    if os.cpu_count() != CORES:
        return
    with contextlib.suppress(Exception):  # of whatever type a broken driver has
        import pynvml as nvml
        import torch

        nvml.nvmlInit()
        its: Any = torch.cuda.get_device_properties(gpu)  # the address is the whole GPU's, also of a part (MIG)
        address = f"{its.pci_domain_id:08x}:{its.pci_bus_id:02x}:{its.pci_device_id:02x}.0"
        nvml.nvmlDeviceSetCpuAffinity(nvml.nvmlDeviceGetHandleByPciBusId(address))


def triton_lacks() -> str:
    """What this host has none of and Triton compiles with, at first use, and what to do; empty where it has all."""
    compiler = os.environ.get("CC") or ("gcc" if shutil.which("gcc") else "clang")  # as Triton chooses
    header = os.path.join(sysconfig.get_paths("posix_prefix")["include"], "Python.h")
    lacks = ["C compiler"] * (not shutil.which(compiler)) + [header] * (not os.path.exists(header))
    how = "so Triton compiles no kernel, and runs take slower ones; install gcc and Python's headers (python3-dev)"
    return f"no {' and no '.join(lacks)}, {how}" if lacks else ""


def find_gpu() -> str:
    """What says that this process has a GPU: nvidia-smi's line, a device file that it may open, or SLURM; else nothing."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    devices = [path for path in glob.glob(DEVICE_FILES) if os.access(path, os.R_OK | os.W_OK)]
    is_hidden = first in ("", "-1", "NoDevFiles")
    return next(iter([] if is_hidden else [*nvidia_smi(), *devices]), "") or granted_by_slurm()


def granted_by_slurm() -> str:
    """The variable by which SLURM says that this process has GPUs, with its value; empty without GPUs, and without SLURM."""
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return f"SLURM_GPUS_ON_NODE={count}" if count not in ("", "0") else ""


def nvidia_smi(query: str = "--query-gpu=name,memory.total,driver_version") -> list[str]:
    """Lines that nvidia-smi answers a query with, by default one for each GPU; empty where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.splitlines() if line.count(",") >= query.count(",")]


if __name__ == "__main__":
    run_alone(lambda: print(choose_accelerator()))
