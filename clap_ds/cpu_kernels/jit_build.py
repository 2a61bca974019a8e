"""Compile the C++ files in `csrc/` into a library, once per machine, and open it.

Kernels take addresses and sizes; the modules that wrap them check shapes and dtypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import DEVNULL, run
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clap_ds.distributed.collectives import rank
from clap_ds.utils.paths import cache_folder, compile_cache_dir

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"),
)
COMPILE_TIMEOUT_S = 300


class Implementation(NamedTuple):
    """Hold the required processor features, as in /proc/cpuinfo, and the compiler flags in addition
    to `FLAGS`."""

    needed: frozenset[str]
    flags: tuple[str, ...]


AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
BF16 = AVX512 | {"avx512_bf16"}
IMPLEMENTATIONS = {
    "AMX": Implementation(
        BF16 | {"amx_tile", "amx_bf16"}, ("-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DCLAP_AMX")
    ),
    "AVX-512": Implementation(BF16, ("-mavx512bf16",)),
    "AVX-512 without bf16": Implementation(AVX512, ("-mno-avx512bf16",)),
}
"""Compilation targets, fastest first."""

_C_TYPES: dict[type, Any] = {int: ctypes.c_int64, float: ctypes.c_float}
log = logging.getLogger(__name__)


def _processor() -> str:
    """Return what `-march=native` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def executable() -> list[str]:
    """List the implementations that this processor supports; the first one is used."""
    features = {
        word
        for line in _processor().splitlines()
        if line.startswith("flags")
        for word in line.split()
    }
    return [name for name, each in IMPLEMENTATIONS.items() if each.needed <= features]


def _compiler() -> list[str]:
    """Return the compiler command from `$CXX`, which may include arguments, or the default."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++" if shutil.which("g++") else "c++"]
    if not shutil.which(command[0]):
        raise RuntimeError("no C++ compiler found; install g++ or set $CXX")
    return command


def _build(flags: Sequence[str]) -> Path:
    """Return the library for this machine, sources and flags, compiling it if necessary. Only this
    user can write it."""
    compiler = _compiler()
    version = run(
        [*compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False
    ).stdout
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    parts = [
        *compiler,
        version,
        _processor(),
        os.confstr("CS_GNU_LIBC_VERSION"),
        *flags,
        *map(Path.read_bytes, sources),
    ]
    try:
        library = (
            compile_cache_dir("cpu_kernels")
            / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
        )
        if rank() == 0 and not library.exists():
            print(
                "compiling the CPU kernels (once)…", file=sys.stderr, flush=True
            )  # takes up to minutes
        with library.with_suffix(".lock").open("a") as lock:
            with contextlib.suppress(OSError):  # of file systems without locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # one rank per host compiles
            if not library.exists():
                _compile(compiler, flags, library)
    except OSError as error:
        raise RuntimeError(
            f"can't store compiled kernels in {cache_folder()} ($XDG_CACHE_HOME): {error}"
        ) from error
    return library


def _compile(compiler: Sequence[str], flags: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        log_file = Path(folder) / "messages"
        command = [*compiler, *flags, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(made)]
        with log_file.open(
            "w"
        ) as messages:  # after a timeout, a pipe would wait for the compiler's subprocesses
            done = run(
                command,
                stdin=DEVNULL,
                stdout=messages,
                stderr=messages,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        if done.returncode != 0:
            lines = log_file.read_text(errors="replace").splitlines() or [
                f"exit status {done.returncode}"
            ]
            first = next((line for line in lines if "error" in line.lower()), lines[0])
            raise RuntimeError(f"{shlex.join(compiler)} can't compile them: {first.strip()}")
        made.replace(library)


def _may_use_amx() -> bool:
    """Request AMX tiles from Linux (arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA). Return whether
    they are permitted."""
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (158, 0x1023, 18))) == 0


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    try:
        if not executable():
            return "this CPU has no AVX-512"
        name = executable()[0]
        if name == "AMX" and not _may_use_amx():
            return "the Linux kernel doesn't permit AMX"
        # Shares torch's OpenMP, which is loaded already under the same name.
        return ctypes.CDLL(str(_build((*FLAGS, *IMPLEMENTATIONS[name].flags))))
    except Exception as error:  # fall back to torch for any error
        problem = str(error) or type(error).__name__
        log.warning("CPU kernels are unavailable, using torch's operations: %s", problem)
        return problem


def unavailable() -> str:
    """Return why the kernels can't be used here; empty if they can."""
    found = _load()
    return found if isinstance(found, str) else ""


def is_ready(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are contiguous bf16 on the CPU, or None."""
    given = [each for each in tensors if each is not None]
    return all(
        each.dtype == torch.bfloat16 and each.is_cpu and each.is_contiguous() for each in given
    )


@functools.cache
def kernel(name: str) -> Callable[..., Any]:
    """Return a function of the library that takes tensors (as addresses), ints (64-bit) and floats
    (32-bit).

    It uses as many threads as torch. Like torch, it can't use several in a process forked after
    threads were started.
    """
    library = _load()
    assert not isinstance(library, str), library
    function = library[name]
    function.restype = None

    def call(*arguments: Tensor | int | float | None) -> None:
        if function.argtypes is None:
            function.argtypes = [_C_TYPES.get(type(each), ctypes.c_void_p) for each in arguments]
        torch.get_num_threads()  # initializes torch's number of threads in new threads
        function(*[each.data_ptr() if isinstance(each, Tensor) else each for each in arguments])

    return call
