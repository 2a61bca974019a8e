"""What `launch/preflight.py` asks of one host: prints a JSON line with its code, versions, GPUs, disk and limits.

Runs as a rank would: by its Python, in its environment, with its GPUs in `CUDA_VISIBLE_DEVICES`. Every host does this at the
same time, often from one file system, so few files are opened: nothing outside the standard library, no package imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import pwd
import re
import resource
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from clap_ds.config.places import PACKAGE
from clap_ds.dist.accelerator import are_there, driver_version, nvidia_smi, torch_cuda

PACKAGES = ("torch", "torchaudio", "deepspeed", "transformers", "pydantic", "webdataset")
IDLE_MIB = 1024
"""Of a GPU's memory, more than which is in use only where a process has it."""
GPU_QUERY = "--query-gpu=index,uuid,memory.used,name,memory.total,driver_version"
PROCESS_QUERY = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"


def code_digest() -> str:
    """Short hash of the package's Python files, presets and scripts, names included."""
    digest = hashlib.sha256()
    found = []
    for folder, subfolders, names in os.walk(PACKAGE, followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        found += [os.path.join(folder, name) for name in names if name.endswith((".py", ".json", ".sbatch"))]
    for path in sorted(found):
        with contextlib.suppress(FileNotFoundError):  # a link to nowhere, such as an editor's lock
            digest.update(os.path.relpath(path, PACKAGE).encode() + b"\0" + Path(path).read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def versions() -> dict[str, str | None]:
    """Of the packages that a run needs, by the names of what installers leave: importlib.metadata alone would load thirty
    modules."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for folder in reversed(sys.path):  # the first is what Python imports
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if match := re.fullmatch(r"([A-Za-z0-9_]+)-([^-]+)(-py[\d.]+)?\.(dist|egg)-info", name):
                    found |= {match[1].lower(): match[2]} if match[1].lower() in PACKAGES else {}
    return found


@dataclass
class Gpu:
    index: str
    uuid: str
    used_mib: int
    shown: str  # its name, memory and driver


def gpus() -> list[Gpu]:
    """Those that the ranks have here, of what nvidia-smi shows."""
    words = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    found = []
    for line in nvidia_smi(GPU_QUERY):
        index, uuid, used, shown = (cell.strip() for cell in line.split(",", 3))
        if words == [""] or any(word == index or (word[:4] == "GPU-" and uuid.startswith(word)) for word in words):
            found.append(Gpu(index, uuid, _mib(used), shown))
    return found


def _mib(text: str) -> int:
    return int(text.split()[0]) if text[:1].isdecimal() else 0


def uses_by_others(those: list[Gpu], job: str) -> tuple[list[str], list[str]]:
    """Which processes that aren't of this SLURM job have these GPUs, and where memory is in use that no process shows for."""
    of_uuid = {gpu.uuid: gpu for gpu in those}
    lines = [[cell.strip() for cell in line.split(",", 3)] for line in (nvidia_smi(PROCESS_QUERY) if those else [])]
    found = [
        f"GPU {of_uuid[uuid].index} is in use by process {pid}{_shown(pid, name)}, {memory}"
        for uuid, pid, memory, name in lines
        # CUDA's own server, by which processes share a GPU, is nobody's.
        if uuid in of_uuid and not _is_of_job(pid, job) and not name.endswith("nvidia-cuda-mps-server")
    ]
    shown = {uuid for uuid, *_ in lines}
    held = [gpu for gpu in those if gpu.uuid not in shown and gpu.used_mib > IDLE_MIB]
    return found, [f"GPU {gpu.index} has {gpu.used_mib} MiB in use, by no process that shows" for gpu in held]


def _shown(pid: str, name: str) -> str:
    """A process's program and user in brackets, as far as they can be told."""
    program, user = "" if name[:1] == "[" else os.path.basename(name), ""  # [Not Found], where nvidia-smi can't tell
    with contextlib.suppress(OSError):
        program = program or Path(f"/proc/{pid}/comm").read_text().strip()
        number = os.stat(f"/proc/{pid}").st_uid
        user = f"of user {number}"
        with contextlib.suppress(KeyError):
            user = f"of {pwd.getpwuid(number).pw_name}"
    known = " ".join(filter(None, (program, user)))
    return f" ({known})" if known else ""


def _is_of_job(pid: str, job: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(job) and f"SLURM_JOB_ID={job}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False  # another user's, whose environment isn't ours to read, or gone


def compilers() -> dict[str, bool]:
    """Whether there is what Triton compiles its launchers with, at the first use of each kernel."""
    compiler = os.environ.get("CC") or "gcc"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {"C compiler": bool(shutil.which(compiler) or shutil.which("clang")), "Python.h": header.exists()}


def free_bytes(folder: str) -> int | None:
    """Free bytes where a folder is or would be made; None when that can't be told."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def main(run_root: str, job: str) -> None:
    those = gpus()
    used, held = uses_by_others(those, job)
    torch, cuda = torch_cuda()
    answer = {
        "code": code_digest(),
        "versions": {"python": platform.python_version(), **versions(), "torch": torch},
        "gpus": [gpu.shown for gpu in those],
        "gpus_used": used,
        "gpus_held": held,
        "has_gpu": bool(those) or are_there(),
        "driver": driver_version(),
        "torch_cuda": cuda,
        "compilers": compilers(),
        "free_bytes": {folder: free_bytes(folder) for folder in (run_root, "/tmp")},
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    print("clap-preflight " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
