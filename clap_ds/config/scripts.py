"""Makes the scripts of a virtual environment run where its path has a space.

    python -m clap_ds.config.scripts .venv/bin

The first line of a script, which names its Python, ends at a space for the kernel. pip writes its own scripts so that they do
without, but not those that a package brings as files, such as `deepspeed`. Standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path


def mend_scripts(folder: Path) -> list[Path]:
    """Have the shell start the Python of scripts whose first line the kernel can't read; gives back which. Raises OSError."""
    mended = []
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink()):
        first, _, rest = path.read_bytes().partition(b"\n")
        python = first.removeprefix(b"#!").strip()
        if first.startswith(b"#!") and b" " in python and python.startswith(str(folder).encode() + b"/python"):
            path.write_bytes(b"#!/bin/sh\n'''exec' \"" + python + b'" "$0" "$@"\n\' \'\'\'\n' + rest)
            mended.append(path)
    return mended


if __name__ == "__main__":
    mend_scripts(Path(sys.argv[1]).absolute())
