"""Where this project's CPU kernels can run: by AMX, or in tests by AVX-512's bf16 instructions; if not, why, said once."""

import os
from contextlib import AbstractContextManager, nullcontext

import pytest

from clap_ds.native import library


def as_they_run_here() -> AbstractContextManager[None]:
    """Has the kernels compiled for what this processor has; a run takes those for AMX alone."""
    return library.without_tiles() if library._why_not_this_processor() else nullcontext()


def _lacking() -> str:
    if os.environ.get("CXX") == "false":  # how .ci/processors.py has everything done by torch's operations
        return "$CXX is false, so no native kernels"
    with as_they_run_here():
        return library._why_not_this_processor()


_LACKING = _lacking()
needs_amx = pytest.mark.skipif(bool(_LACKING), reason=_LACKING)
"""Runs this project's CPU kernels, which are for processors with AMX or AVX-512's bf16 instructions."""
