"""Validate run configurations before they are queued.

Examples:
    python -m clap_ds.check_runs --train my_run.json

Prints the versions of the packages a run needs, importing only pydantic of them. Prints one line per problem and exits
with code 2 if there are any.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from clap_ds.config.arguments import make_parser
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.paths import version as version

PACKAGES = (
    "torch", "torchaudio", "deepspeed", "transformers", "huggingface_hub", "tokenizers", "safetensors", "pydantic",
    "numpy", "psutil", "tensorboard", "tqdm",
)  # fmt: skip
"""Imported by every run."""
PACKAGES_FOR_SHARDS = ("webdataset", "braceexpand", "fsspec", "soundfile")


def missing(packages: Iterable[str]) -> str:
    """Return a message naming the packages that aren't installed, or an empty string."""
    names = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(names)} not installed for {sys.executable}" if names else ""


def check(paths: list[Path], *, train: bool) -> None:
    """Raise a UserError that lists the problems of all files, one per line, each prefixed with its file."""
    from clap_ds.config.settings import load_run  # not at the top: pydantic may be missing

    problems = []
    for path in paths:
        try:
            run = load_run(path)
        except UserError as error:
            problems.append(str(error))
            continue
        needed = PACKAGES_FOR_SHARDS if run.clap.data.source == "webdataset" else ("fsspec",) if train else ()
        if lack := missing(needed):
            problems.append(f"{path}: {lack}: run `pip install 'clap-ds[train]'`")
        elif train:
            from clap_ds.training.checks import problems_for_training

            problems += [f"{path}: {problem}" for problem in problems_for_training(run.clap, run.deepspeed)]
    if problems:
        raise UserError("\n".join(problems))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--train", action="store_true", help="also check what training requires")
    arguments = parser.parse_args()
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    print("clap-check", json.dumps(versions), flush=True)
    if lack := missing(PACKAGES):
        raise UserError(f"{lack}: run `make setup` and use .venv, or name another python in the cluster profile")
    if arguments.files:
        check(arguments.files, train=arguments.train)


if __name__ == "__main__":
    run_alone(main)
