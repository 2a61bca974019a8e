"""This project's CPU kernels compiled for each instruction set that this processor has, and for AMX emulated by AVX-512;
without any, why not, said once."""

import functools
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clap_ds.cpu_kernels import jit_build

EMULATED = "AMX, emulated"
_HEADER = Path(__file__).parent / "cpu_kernels" / "emulated_amx.h"
_EMULATION = (
    f'-DCLAP_EMULATED_AMX="{_HEADER}"',
    f"-DVERSION={zlib.crc32(_HEADER.read_bytes())}",
)  # a new one is compiled anew
IMPLEMENTATIONS = {
    **jit_build.IMPLEMENTATIONS,
    EMULATED: jit_build.Implementation(jit_build.AVX512, ("-mno-avx512bf16", "-DCLAP_AMX", *_EMULATION)),
}
_load_first = jit_build._load.__wrapped__
_load = functools.cache(lambda name: _load_first())


@contextmanager
def compiled_for(name: str) -> Iterator[None]:
    """Has the kernels be this implementation's."""
    jit_build.kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit_build, "IMPLEMENTATIONS", {name: IMPLEMENTATIONS[name]})
        patch.setattr(jit_build, "_load", lambda: _load(name))
        yield
    jit_build.kernel.cache_clear()


def _lacking() -> str:
    if os.environ.get("CXX") == "false":  # how .ci/processors.py has everything done by torch's operations
        return "$CXX is false, so no native kernels"
    return "" if jit_build.executable() else jit_build.unavailable()


_LACKING = _lacking()
needs_kernels = pytest.mark.skipif(bool(_LACKING), reason=_LACKING)
"""Runs this project's CPU kernels, those that a run takes."""
each_implementation = pytest.mark.parametrize(
    "kernels",
    [pytest.param(name, marks=needs_kernels) for name in [*jit_build.executable(), EMULATED]],
    indirect=True,
    scope="module",
)
"""Runs them in every implementation that this processor can execute, and in AMX's with its instructions emulated."""
