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
from clap_ds.utils.paths import version

# imported by every run
PACKAGES = (
    "torch", "torchaudio", "deepspeed", "transformers", "huggingface_hub", "tokenizers", "safetensors", "pydantic",
    "numpy", "psutil", "tensorboard", "tqdm",
)  # fmt: skip
PACKAGES_FOR_SHARDS = ("webdataset", "braceexpand", "fsspec", "soundfile")
# fields of `clap` with paths of files that must exist: of all runs, and only of training
DATA_FIELDS = ("data.shards", "data.tokenizer")
TRAIN_FIELDS = (
    "evaluation.retrieval.shards", "evaluation.zero_shot.shards", "evaluation.tokenizer", "train.pretrained",
    "train.resume",
)  # fmt: skip
_URL = re.compile(r"\w{1,40}:.*")
# URLs, names on the Hub, and `auto`
_URL_OR_NAME = re.compile(
    rf"{_URL.pattern}"
    # not a file of weights
    r"|(?!.{0,200}\.(safetensors|pt|pth|bin|ckpt)$)\w[\w.-]{0,95}(/\w[\w.-]{0,95})?"
)


def describe_missing(packages: Iterable[str]) -> str:
    """Return a message naming the packages that aren't installed, or an empty string."""
    names = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(names)} not installed for {sys.executable}" if names else ""


def find_missing_paths(clap: dict[str, Any], *, train: bool) -> Iterator[tuple[str, str]]:
    """Yield fields of `clap`, with the first local path in each folder that isn't here."""
    for field in DATA_FIELDS + TRAIN_FIELDS if train else DATA_FIELDS:
        value = find_field(clap, field)
        if value is None:
            continue
        missing_by_folder: dict[str, str] = {}
        for path in expand_braces([value] if isinstance(value, str) else value):
            is_shard = field.endswith("shards")
            elsewhere = _URL if is_shard else _URL_OR_NAME
            exists = os.path.isfile if is_shard else os.path.exists
            if elsewhere.fullmatch(path) or any(map(exists, glob.glob(path) or [path])):
                continue
            missing_by_folder.setdefault(os.path.dirname(path), path)
        for path in missing_by_folder.values():
            yield f"clap.{field}", path


def expand_braces(patterns: Iterable[str]) -> Iterator[str]:
    # not at the top: a run without shards doesn't need it
    from braceexpand import braceexpand

    for pattern in patterns:
        yield from braceexpand(pattern.removeprefix("file://"))


def check(paths: list[Path], *, train: bool, may_appear: bool = False) -> None:
    """Raise a UserError that lists the problems of all files, one per line, each prefixed with its
    file."""
    problems = []
    for path in paths:
        try:
            problems += [f"{path}: {problem}" for problem in check_run(path, train, may_appear)]
        # whose lines begin with the file
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


def check_run(path: Path, train: bool, may_appear: bool) -> Iterator[str]:
    """Yield the problems of a run whose fields are valid. Raises UserError if any aren't.

    A missing shard, tokenizer or checkpoint is a problem if its folder exists. Otherwise other
    hosts may have it: a note is printed, as for runs whose files `may_appear` before they start.
    """
    # not at the top: pydantic may be missing
    from clap_ds.config.settings import load_run
    from clap_ds.training.plan import problems_for_training

    run = load_run(path)
    packages: tuple[str, ...] = ()
    if train:
        packages = ("fsspec",)
    if run.clap.data.source == "webdataset":
        packages = PACKAGES_FOR_SHARDS
    if missing := describe_missing(packages):
        yield f"{missing}: run `pip install 'clap-ds[train]'`"
        return
    if train:
        yield from problems_for_training(run.clap, run.deepspeed)
    for field, missing_path in find_missing_paths(run.clap.model_dump(), train=train):
        place = f"{missing_path or repr('')} (working folder: {Path.cwd()})"
        problem = f"{field}: {platform.node()} has no such file: {place}"
        folder = os.path.dirname(missing_path) or os.curdir
        # Every host has the root folder.
        if may_appear or folder == "/" or not os.path.isdir(folder):
            print(f"note: {problem}; the job fails if its hosts lack it, too")
        else:
            yield problem


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE")
    add("--train", action="store_true", help="also check what training requires")
    appear_help = "accept missing shards, tokenizers and checkpoints"
    add("--may_appear", action="store_true", help=appear_help)
    arguments = parser.parse_args()
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    # launch/ reads this line.
    print("clap-check", json.dumps(versions), flush=True)
    if missing := describe_missing(PACKAGES):
        advice = "run `make setup` and use .venv, or name another python in the cluster profile"
        raise UserError(f"{missing}: {advice}")
    check(arguments.files, train=arguments.train, may_appear=arguments.may_appear)


if __name__ == "__main__":
    run_alone(main)
