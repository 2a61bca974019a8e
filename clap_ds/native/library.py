"""Compiles the C++ files beside this one into a library, once per machine, and opens it.

Kernels take addresses and sizes as C functions do; the modules that wrap them check shapes and dtypes.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-mamx-tile", "-mamx-bf16", "-mavx512f", "-mavx512bw", "-mavx512vl"),
    *("-mavx512bf16", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"),
)
COMPILE_TIMEOUT_S = 300

_C_TYPES = {int: ctypes.c_int64, float: ctypes.c_float, NoneType: ctypes.c_void_p}
_switched_off = False
log = logging.getLogger(__name__)


class UnavailableError(Exception):
    """Why there are no native kernels here."""


def cache_directory() -> Path:
    """Where compiled libraries are kept: `$XDG_CACHE_HOME/clap_ds`, by default below `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "clap_ds"


def _sources() -> list[Path]:
    return sorted(HERE.glob("*.cpp"))


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise UnavailableError("no C++ compiler found (g++, or what $CXX names)")
    return compiler


def _build() -> Path:
    """The library for this machine and these sources, compiled unless it is there."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [version, _processor(), *FLAGS]
    parts += [path.read_text() for path in [*sorted(HERE.glob("*.h")), *_sources()]]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    directory = cache_directory()
    library = directory / f"native-{digest}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"native-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of a host: one compiles
        if not library.exists():
            _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    log.info("compiling CPU kernels (once): %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *FLAGS, *map(str, _sources()), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if result.returncode != 0:
            raise UnavailableError(f"{compiler} can't compile them: {result.stderr.strip().splitlines()[:1]}")
        made.replace(library)


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not torch.cpu._is_amx_tile_supported():
        return "this CPU has no bf16 matrix units (AMX)"
    try:
        library = ctypes.CDLL(str(_build()))  # its OpenMP is torch's: loaded before, under the same name
    except (UnavailableError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    if library.clap_request_amx() != 0:
        return "the kernel doesn't let processes use AMX"
    return library


@contextmanager
def torch_instead() -> Iterator[None]:
    """Has everything that asks `unavailable` do with torch's operations, in this process, for the time."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def unavailable() -> str:
    """Why the kernels can't be used here; empty where they can."""
    if _switched_off:
        return "switched off for the time"
    found = _load()
    return found if isinstance(found, str) else ""


def takes(tensor: Tensor) -> bool:
    """Whether kernels can work on this tensor: one in the CPU's memory, not one that is only being traced."""
    plain = tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter)
    return plain and not torch.compiler.is_compiling() and not unavailable()


@functools.cache
def kernel(name: str) -> Callable[..., Any]:
    """A function of the library; tensors among its arguments become addresses, ints 64-bit integers, floats C floats."""
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(f"no native CPU kernels: {library}")
    function = library[name]
    function.restype = None

    def call(*arguments: Tensor | int | float | None) -> None:
        if function.argtypes is None:
            function.argtypes = [
                ctypes.c_void_p if isinstance(each, Tensor) else _C_TYPES[type(each)] for each in arguments
            ]
        function(*[each.data_ptr() if isinstance(each, Tensor) else each for each in arguments])

    return call
