"""What `launch/preflight.py` asks of one host: prints a JSON line with its clock, code, versions, GPUs and driver, compilers,
disk, limits and ports.

Standard library only, and torch is not imported: versions come from the installed packages' metadata.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # By its path, as job scripts start it: of a checkout or of an installed package.
    sys.path[0] = next(str(folder) for folder in Path(__file__).resolve().parents if (folder / "clap_ds").is_dir())

from clap_ds.config.places import PACKAGE
from clap_ds.dist.accelerator import are_there, driver_version, nvidia_smi, torch_cuda

PACKAGES = ("torch", "torchaudio", "deepspeed", "transformers", "pydantic", "webdataset")


def code_digest() -> str:
    """Short hash of the package's Python files, presets and scripts, names included."""
    digest = hashlib.sha256()
    found = (Path(folder, name) for folder, _, names in os.walk(PACKAGE, followlinks=True) for name in names)
    for path in sorted(found):
        if path.suffix in (".py", ".json", ".sbatch") and path.is_file():
            digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


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
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def port_is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def main() -> None:
    run_root, port = sys.argv[1], int(sys.argv[2])
    now = time.time()
    answer: dict[str, Any] = {
        "host": sys.argv[3] if len(sys.argv) > 3 else os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "time": now,
        "code": code_digest(),
        "versions": versions(),
        "gpus": nvidia_smi(),
        "has_gpu": are_there(),
        "driver": driver_version(),
        "torch_cuda": torch_cuda()[1],
        "compilers": compilers(),
        "free_bytes": {folder: free_bytes(folder) for folder in (run_root, "/tmp")},
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "port_free": port_is_free(port),
    }
    print("clap-preflight " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
