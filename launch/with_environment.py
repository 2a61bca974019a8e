"""Starts a rank's script with the variables of a file: `with_environment.py FILE SCRIPT ARGUMENTS…`.

`deepspeed --launcher slurm` hands variables to ranks through `srun --export`, which cuts a value at its first comma:
NCCL_ALGO=Tree,Ring would arrive as Tree. Standard library only.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    path, *command = sys.argv[1:]
    with open(path) as file:
        for line in file:
            name, equals, value = line.rstrip("\n").partition("=")
            if equals:
                os.environ[name] = value
    os.execv(sys.executable, [sys.executable, "-u", *command])


if __name__ == "__main__":
    main()
