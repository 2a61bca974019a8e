"""Compile this project's CPU kernels for each instruction set of this CPU, and for AMX emulated
with AVX-512."""

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
_FLAGS = (
    "-mno-avx512bf16",
    "-DCLAP_AMX",
    f'-DCLAP_EMULATED_AMX="{_HEADER}"',
    # Recompiled for a new version of the header.
    f"-DVERSION={zlib.crc32(_HEADER.read_bytes())}",
)
IMPLEMENTATIONS = {
    **jit_build.IMPLEMENTATIONS,
    EMULATED: jit_build.Implementation(jit_build.AVX512, _FLAGS),
}
# The first implementation of `jit_build.IMPLEMENTATIONS` is loaded, and remembered by its name.
_load_first = jit_build._load.__wrapped__
_load = functools.cache(lambda name: _load_first())


@contextmanager
def compiled_for(name: str) -> Iterator[None]:
    """Use this implementation's kernels."""
    jit_build.kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit_build, "IMPLEMENTATIONS", {name: IMPLEMENTATIONS[name]})
        patch.setattr(jit_build, "_load", lambda: _load(name))
        yield
    jit_build.kernel.cache_clear()


def _lacking() -> str:
    # .ci/processors.py disables native kernels like this.
    if os.environ.get("CXX") == "false":
        return "$CXX is false, so no native kernels"
    return "" if jit_build.supported_implementations() else jit_build.unavailable()


_LACKING = _lacking()
needs_kernels = pytest.mark.skipif(bool(_LACKING), reason=_LACKING)
"""Run this project's CPU kernels as a run does."""
each_implementation = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(name, marks=needs_kernels)
        for name in [*jit_build.supported_implementations(), EMULATED]
    ],
    indirect=True,
    scope="module",
)
"""Run every implementation that this CPU supports, and AMX with emulated instructions."""
