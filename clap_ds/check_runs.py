"""Validate run configurations before they are queued.

Examples:
    python -m clap_ds.check_runs --train my_run.json

Prints the versions of the packages a run needs, importing only pydantic of them. Prints one line
per problem and exits with code 2 if there are any.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clap_ds.config.arguments import find_field, make_parser
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.paths import version as version

PACKAGES = (
    "torch", "torchaudio", "deepspeed", "transformers", "huggingface_hub", "tokenizers", "safetensors", "pydantic",
    "numpy", "psutil", "tensorboard", "tqdm",
)  # fmt: skip
"""Imported by every run."""
PACKAGES_FOR_SHARDS = ("webdataset", "braceexpand", "fsspec", "soundfile")
PATHS = (
    "data.shards", "data.tokenizer", "evaluation.retrieval.shards", "evaluation.zero_shot.shards", "evaluation.tokenizer",
    "train.pretrained", "train.resume",
)  # fmt: skip
"""Fields of `clap` with paths of files that must exist; benchmarks read the first two."""
_URL = re.compile(r"\w{1,40}:.*")
_URL_OR_NAME = re.compile(
    rf"{_URL.pattern}|(?!.{{0,200}}\.(safetensors|pt|pth|bin|ckpt)$)\w[\w.-]{{0,95}}(/\w[\w.-]{{0,95}})?"
)
"""URLs, names on the Hub, and `auto`."""


def missing(packages: Iterable[str]) -> str:
    """Return a message naming the packages that aren't installed, or an empty string."""
    names = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(names)} not installed for {sys.executable}" if names else ""


def find_missing_paths(clap: dict[str, Any], *, train: bool) -> Iterator[tuple[str, str]]:
    """Yield fields of `clap`, with the first local path in each folder that isn't here."""
    for field in PATHS if train else PATHS[:2]:
        value = find_field(clap, field)
        if value is not None:
            from braceexpand import (
                braceexpand,
            )  # not at the top: a run without shards doesn't need it

            are_shards = field.endswith("shards")
            exists = os.path.isfile if are_shards else os.path.exists
            elsewhere = _URL if are_shards else _URL_OR_NAME
            missing_by_folder: dict[str, str] = {}
            for pattern in [value] if isinstance(value, str) else value:
                for path in braceexpand(pattern.removeprefix("file://")):
                    if not (
                        elsewhere.fullmatch(path) or any(map(exists, glob.glob(path) or [path]))
                    ):
                        missing_by_folder.setdefault(os.path.dirname(path), path)
            for path in missing_by_folder.values():
                yield f"clap.{field}", path


def check(paths: list[Path], *, train: bool, may_appear: bool = False) -> None:
    """Raise a UserError that lists the problems of all files, one per line, each prefixed with its
    file.

    A missing shard, tokenizer or checkpoint is a problem if its folder exists. Otherwise other
    hosts may have it: a note is printed, as for runs whose files `may_appear` before they start.
    """
    from clap_ds.config.settings import load_run  # not at the top: pydantic may be missing

    problems = []
    for path in paths:
        try:
            run = load_run(path)
        except UserError as error:
            problems.append(str(error))
            continue
        needed = (
            PACKAGES_FOR_SHARDS
            if run.clap.data.source == "webdataset"
            else ("fsspec",)
            if train
            else ()
        )
        if lack := missing(needed):
            problems.append(f"{path}: {lack}: run `pip install 'clap-ds[train]'`")
            continue
        if train:
            from clap_ds.training.plan import problems_for_training

            problems += [
                f"{path}: {problem}" for problem in problems_for_training(run.clap, run.deepspeed)
            ]
        for field, missing_path in find_missing_paths(run.clap.model_dump(), train=train):
            shown_path = missing_path or "''"
            problem = f"{field}: {platform.node()} has no such file: {shown_path} (working folder: {Path.cwd()})"
            folder = os.path.dirname(missing_path) or os.curdir
            if may_appear or folder == "/" or not os.path.isdir(folder):
                print(f"note: {problem}; the job fails if its hosts lack it, too")
            else:
                problems.append(f"{path}: {problem}")
    if problems:
        raise UserError("\n".join(problems))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--train", action="store_true", help="also check what training requires")
    parser.add_argument(
        "--may_appear",
        action="store_true",
        help="accept missing shards, tokenizers and checkpoints",
    )
    arguments = parser.parse_args()
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    print("clap-check", json.dumps(versions), flush=True)
    if lack := missing(PACKAGES):
        raise UserError(
            f"{lack}: run `make setup` and use .venv, or name another python in the cluster profile"
        )
    if arguments.files:
        check(arguments.files, train=arguments.train, may_appear=arguments.may_appear)


if __name__ == "__main__":
    run_alone(main)
