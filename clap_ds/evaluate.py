"""Command: audio–text retrieval and zero-shot classification of a checkpoint.

    python clap_ds/evaluate.py CHECKPOINT --retrieval 'held_out/*.tar' --zero_shot 'held_out/*.tar'
    deepspeed clap_ds/evaluate.py CHECKPOINT --deepspeed_config my_run.json

CHECKPOINT is one of this project's (or the folder they lie in), a folder that `transformers.ClapModel` loads, or a LAION-CLAP
.pt file. What is evaluated stands in the configuration's `clap.evaluation`, on the command line, which counts more, or both.
Runs under deepspeed, torchrun and, as a single rank, under plain python.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # A launcher starts this file by its path, which puts the package's folder, not its parent, on the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import ValidationError

from clap_ds.config.errors import UserError
from clap_ds.config.model import preset_names
from clap_ds.config.sections import EvaluationSettings
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.dist.distributed import Ranks, check_hostfile, choose_accelerator, run_command

MICRO_BATCH = 32
PRECISIONS = ("fp32", "bf16", "fp16")
FIELD_OPTIONS = {
    "clap.evaluation.retrieval.shards": "--retrieval",
    "clap.evaluation.zero_shot.shards": "--zero_shot",
    "clap.evaluation.zero_shot.class_field": "--class_field",
    "clap.evaluation.zero_shot.templates": "--template",
    "clap.evaluation.zero_shot.classes": "--classes",
    "clap.evaluation.tokenizer": "--tokenizer",
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="clap_ds/evaluate.py",
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or file of weights")
    parser.add_argument("--retrieval", nargs="+", metavar="SHARDS", help="tars of clips with captions")
    parser.add_argument("--zero_shot", nargs="+", metavar="SHARDS", help="tars of clips with their class in a json")
    parser.add_argument(
        "--class_field", metavar="FIELD", help="member of the json that names the class (default: kind)"
    )
    parser.add_argument("--template", action="append", metavar="TEXT", help="caption with {} for the class; repeatable")
    parser.add_argument(
        "--classes", type=Path, metavar="FILE", help="JSON: a list of classes, or class → names in captions"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="hub name or folder (default: the checkpoint's)")
    parser.add_argument("--preset", choices=preset_names(), help="the model's sizes, for a file that doesn't say them")
    parser.add_argument("--text_tokens", type=_positive, metavar="N", help="caption length (default: 77 at most)")
    parser.add_argument("--micro_batch", type=_positive, metavar="N", help=f"clips per rank (default: {MICRO_BATCH})")
    parser.add_argument("--num_workers", type=int, metavar="N", help="decoding processes per rank (default: 0)")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: the configuration's, else fp32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument(
        "--deepspeed_config",
        type=Path,
        metavar="FILE",
        help="a run's JSON or a packaged one's name, for clap.evaluation",
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="refuse to run on fewer or more ranks")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def main(ranks: Ranks) -> None:
    arguments = parse_arguments()
    run = load_run(arguments.deepspeed_config) if arguments.deepspeed_config else None
    settings = evaluation_settings(arguments, run)
    if not Path(arguments.checkpoint).exists():
        raise UserError(f"{arguments.checkpoint}: no such file or folder (working folder: {Path.cwd()})")
    if arguments.json is not None and ranks.is_first:
        _check_writable(arguments.json)
    if arguments.hostfile:
        check_hostfile(arguments.hostfile, ranks)

    # Loading torch takes seconds: only for an evaluation that can start.
    choose_accelerator()
    from clap_ds.evaluation.command import Options, evaluate_checkpoint

    options = Options(
        checkpoint=arguments.checkpoint,
        preset=arguments.preset or (run.clap.model.preset if run else None),
        text_tokens=arguments.text_tokens or (run.clap.text_tokens if run else None),
        micro_batch=settings.micro_batch or (run.micro_batch if run else MICRO_BATCH),
        precision=arguments.precision or (run.precision if run and run.precision in PRECISIONS else "fp32"),
        json_path=arguments.json,
    )
    try:
        evaluate_checkpoint(settings, options, ranks)
    except UserError as error:
        raise UserError(str(error) if run else in_options(str(error))) from None


def in_options(message: str) -> str:
    """A message about fields of `clap.evaluation`, in the command line's words."""
    for field, option in FIELD_OPTIONS.items():
        message = message.replace(field, option)
    return message


def evaluation_settings(arguments: argparse.Namespace, run: RunSettings | None) -> EvaluationSettings:
    """`clap.evaluation` of the configuration, if there is one, with the command line's changes.

    Raises:
        UserError: nothing to evaluate, options without the task they are for, or values that can't be.
    """
    content: dict[str, Any] = run.clap.evaluation.model_dump() if run else {}
    tasks = {
        "retrieval": {"shards": arguments.retrieval},
        "zero_shot": {
            "shards": arguments.zero_shot,
            "class_field": arguments.class_field,
            "templates": arguments.template,
            "classes": _read_classes(arguments.classes) if arguments.classes else None,
        },
    }
    for name, changes in tasks.items():
        changed = {field: value for field, value in changes.items() if value is not None}
        given = content.get(name) or {}
        if changed and "shards" not in {**given, **changed}:
            raise UserError(
                f"--class_field, --template and --classes are for zero-shot evaluation: give --{name} SHARDS too"
            )
        content[name] = {**given, **changed} or None
    if not (content["retrieval"] or content["zero_shot"]):
        where = f"{run.path} has no clap.evaluation" if run else "there is no --deepspeed_config"
        raise UserError(f"nothing to evaluate: give --retrieval SHARDS, --zero_shot SHARDS or both ({where})")
    for name in ("tokenizer", "micro_batch", "num_workers"):
        if getattr(arguments, name) is not None:
            content[name] = getattr(arguments, name)
    data = run.clap.data if run else None
    content["tokenizer"] = content.get("tokenizer") or getattr(data, "tokenizer", None)
    try:
        return EvaluationSettings.model_validate(content)
    except ValidationError as error:
        problems = (f"--{'.'.join(map(str, each['loc'])) or 'options'}: {each['msg']}" for each in error.errors())
        raise UserError("\n".join(problems)) from None


def _read_classes(path: Path) -> dict[str, list[str]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--classes {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--classes {path}: can't be read as JSON: {error}") from None
    if isinstance(content, list):
        content = {str(name): [name] for name in content}
    if isinstance(content, dict):
        classes = {name: [names] if isinstance(names, str) else names for name, names in content.items()}
        if all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in classes.values()):
            return classes
    raise UserError(
        f"--classes {path}: expected a list of class names, or an object of class → name or list of names in captions"
    )


def _check_writable(path: Path) -> None:
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise UserError(f"--json {path}: can't be written: {error.strerror}") from None


def command() -> None:
    """Console command `clap-evaluate`."""
    run_command(main)


if __name__ == "__main__":
    command()
