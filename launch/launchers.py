"""Command lines of this package's scripts, here and on other hosts. Leaves running them to others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clap_ds.config.places import PACKAGE

FOLDER = Path(__file__).resolve().parent
SSH = ["ssh", "-oBatchMode=yes", "-oConnectTimeout=15", "-oServerAliveInterval=10", "-oServerAliveCountMax=6"]


def this_host() -> str:
    """Name of this host as SLURM's node lists have it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def python_path() -> str:
    """`PYTHONPATH` by which a Python that this package isn't installed for finds it, too."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *given]))


def script_command(python: str, name: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Command line of a script of this folder, for any host; `options` are Python's."""
    return ["env", f"PYTHONPATH={python_path()}", python, *options, "-u", str(FOLDER / name), *arguments]
