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
from subprocess import DEVNULL, STDOUT, run
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clap_ds.distributed.collectives import rank
from clap_ds.utils.paths import cache_folder

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"),
)
COMPILE_TIMEOUT_S = 300


class Implementation(NamedTuple):
    """Required processor features, as in /proc/cpuinfo, and compiler flags in addition to
    `FLAGS`."""

    features: frozenset[str]
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
    # All cores have the same lines.
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def supported_implementations() -> list[str]:
    """List the implementations that this processor supports; the first one is used."""
    features = set(_processor().split())
    return [name for name, target in IMPLEMENTATIONS.items() if target.features <= features]


def _compiler() -> list[str]:
    """Return the compiler command from `$CXX`, which may include arguments, or the default."""
    # `$CXX` may have arguments, such as `ccache g++`.
    command = shlex.split(os.environ.get("CXX", "")) or ["g++" if shutil.which("g++") else "c++"]
    if not shutil.which(command[0]):
        raise RuntimeError("no C++ compiler found; install g++ or set $CXX")
    return command


def _build(flags: Sequence[str]) -> Path:
    """Return the library for this machine, sources and flags, compiling it if necessary. Only this
    user can write it."""
    compiler = _compiler()
    version = run([*compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S)
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    # Everything that the library depends on is in its name.
    parts = [
        *compiler,
        version.stdout,
        _processor(),
        os.confstr("CS_GNU_LIBC_VERSION"),
        *flags,
        *map(Path.read_bytes, sources),
    ]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    try:
        library = cache_folder("cpu_kernels") / f"{digest}.so"
        if rank() == 0 and not library.exists():
            # It takes up to minutes.
            print("compiling the CPU kernels (once)…", file=sys.stderr, flush=True)
        with library.with_suffix(".lock").open("a") as lock:
            # One rank per host compiles, on file systems with locks.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(compiler, flags, library)
    except OSError as error:
        raise RuntimeError(
            f"can't store compiled kernels ($XDG_CACHE_HOME sets the folder): {error}"
        ) from error
    return library


def _compile(compiler: Sequence[str], flags: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        log_file = Path(folder) / "messages"
        command = [*compiler, *flags, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(output)]
        # After a timeout, a pipe would wait for the compiler's subprocesses.
        with log_file.open("w") as messages:
            ended = run(
                command, stdin=DEVNULL, stdout=messages, stderr=STDOUT, timeout=COMPILE_TIMEOUT_S
            )
        if ended.returncode != 0:
            lines = log_file.read_text(errors="replace").splitlines()
            lines = lines or [f"exit status {ended.returncode}"]
            message = next((line for line in lines if "error" in line.lower()), lines[0])
            raise RuntimeError(f"{shlex.join(compiler)} can't compile them: {message.strip()}")
        # Atomic, as other processes may open the library at any time.
        output.replace(library)


def _may_use_amx() -> bool:
    """Request AMX tiles from Linux (arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA). Return whether
    they are permitted."""
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (158, 0x1023, 18))) == 0


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    try:
        if not supported_implementations():
            return "this CPU has no AVX-512"
        name = supported_implementations()[0]
        if name == "AMX" and not _may_use_amx():
            return "the Linux kernel doesn't permit AMX"
        # Shares torch's OpenMP, which is loaded already under the same name.
        return ctypes.CDLL(str(_build((*FLAGS, *IMPLEMENTATIONS[name].flags))))
    except Exception as error:
        # Whatever is wrong, torch's operations work.
        problem = str(error) or type(error).__name__
        log.warning("CPU kernels are unavailable, using torch's operations: %s", problem)
        return problem


def unavailable() -> str:
    """Return why the kernels can't be used here; empty if they can."""
    library = _load()
    return library if isinstance(library, str) else ""


def is_ready(*tensors: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether all tensors are contiguous on the CPU in this dtype, or None."""
    return all(
        tensor is None or (tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous())
        for tensor in tensors
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
            types = [_C_TYPES.get(type(argument), ctypes.c_void_p) for argument in arguments]
            function.argtypes = types
        # Initializes torch's number of threads in new threads.
        torch.get_num_threads()
        function(
            *[
                argument.data_ptr() if isinstance(argument, Tensor) else argument
                for argument in arguments
            ]
        )

    return call
