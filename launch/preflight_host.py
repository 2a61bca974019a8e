"""What `launch/preflight.py` asks of one host: prints a JSON line with its clock, code, versions, GPUs, disk and so on."""

from __future__ import annotations

import contextlib
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


def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


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


def port_is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind(("", port))
            return True
    return False


def main(run_root: str, port: str) -> None:
    answer = {
        "time": time.time(),
        "code": code_digest(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "gpus": nvidia_smi(),
        "has_gpu": are_there(),
        "driver": driver_version(),
        "torch_cuda": torch_cuda()[1],
        "compilers": compilers(),
        "free_bytes": {folder: free_bytes(folder) for folder in (run_root, "/tmp")},
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "port_free": port_is_free(int(port)),
    }
    print("clap-preflight " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
