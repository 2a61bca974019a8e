"""Starts a rank's script with the variables of a file: `with_environment.py FILE SCRIPT ARGUMENTS…`. Standard library only.

`deepspeed --launcher slurm` hands variables to ranks through `srun --export`, which cuts a value at its first comma:
NCCL_ALGO=Tree,Ring would arrive as Tree.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    for line in Path(sys.argv[1]).read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals:
            os.environ[name] = value
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
