"""Where this project's CPU kernels can run: by AMX, or in tests by AVX-512's bf16 instructions; if not, why, said once."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from clap_ds.native import library

_load_without_amx = functools.cache(library._load.__wrapped__)


@contextmanager
def as_they_run_here() -> Iterator[None]:
    """Has the kernels compiled for what this processor has; a run takes those for AMX alone."""
    if not library._why_not_this_processor():
        yield
        return
    library.kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "FLAGS", tuple(flag.replace("-mamx", "-mno-amx") for flag in library.FLAGS))
        patch.setattr(library, "NEEDED", tuple(name for name in library.NEEDED if "amx" not in name))
        patch.setattr(library, "_load", _load_without_amx)
        yield
    library.kernel.cache_clear()


def _lacking() -> str:
    if os.environ.get("CXX") == "false":  # how .ci/processors.py has everything done by torch's operations
        return "$CXX is false, so no native kernels"
    with as_they_run_here():
        return library._why_not_this_processor()


_LACKING = _lacking()
needs_amx = pytest.mark.skipif(bool(_LACKING), reason=_LACKING)
"""Runs this project's CPU kernels, which are for processors with AMX or AVX-512's bf16 instructions."""
