"""Whether this project's CPU kernels can run here; the reason why not, said once."""

import os

import pytest

from clap_ds.native import library

_OFF = (
    os.environ.get("CXX") == "false"
)  # no kernels can be compiled: how .ci/processors.py has everything done by torch's
_LACKING = "$CXX is false, so no native kernels" if _OFF else library._why_not_this_processor()

needs_amx = pytest.mark.skipif(bool(_LACKING), reason=_LACKING)
"""Runs this project's CPU kernels, which are for processors with AMX."""
