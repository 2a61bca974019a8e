"""Command: check runs' JSONs, as the run itself would, before they are queued.

    python -m clap_ds.check_runs [--train] FILE…

First prints what this Python has of the packages a run needs. Every problem is a line; exit code 2 where there is one. Imports
none of those packages but pydantic.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.paths import version as version

PACKAGES = (
    "torch", "torchaudio", "deepspeed", "transformers", "huggingface_hub", "tokenizers", "safetensors", "pydantic",
    "numpy", "psutil", "rich", "tensorboard", "tqdm",
)  # fmt: skip
"""What every run imports."""
PACKAGES_FOR_SHARDS = ("webdataset", "braceexpand", "fsspec", "soundfile")


def missing(packages: Iterable[str]) -> str:
    """Say which of these packages this Python lacks; empty where it has all."""
    names = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{sys.executable} has no {', '.join(names)}" if names else ""


def check(paths: list[Path], *, train: bool) -> None:
    """Raise a UserError with the problems of all files, each line beginning with its file."""
    from clap_ds.config.settings import load_run  # not at the top: pydantic may be what is missing

    problems = []
    for path in paths:
        try:
            run = load_run(path)
        except UserError as error:
            problems.append(str(error))
            continue
        needed = PACKAGES_FOR_SHARDS if run.clap.data.source == "webdataset" else ("fsspec",) if train else ()
        if lack := missing(needed):
            problems.append(f"{path}: {lack}: `pip install 'clap-ds[train]'`")
        elif train:
            from clap_ds.training.checks import problems_for_training

            problems += [f"{path}: {problem}" for problem in problems_for_training(run)]
    if problems:
        raise UserError("\n".join(problems))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m clap_ds.check_runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--train", action="store_true", help="what training needs besides, too")
    arguments = parser.parse_args()
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    print("clap-check", json.dumps(versions), flush=True)
    if lack := missing(PACKAGES):
        raise UserError(f"{lack}: `make setup` makes .venv, which has all, or name another python in the site file")
    if arguments.files:
        check(arguments.files, train=arguments.train)


if __name__ == "__main__":
    run_alone(main)
