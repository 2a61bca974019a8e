"""Argument types and options shared by commands. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any


def make_parser(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command, described by the first line of its module's docstring."""
    return argparse.ArgumentParser(prog, description=(doc or "").splitlines()[0], allow_abbrev=False)


def whole_number(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """Return an argparse `type=` for whole numbers from `low`, up to `high` if given."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return partial(_parse, int, lambda value: low <= value and (high is None or value <= high), expected)


def number(low: float, high: float) -> Callable[[str], float]:
    """Return an argparse `type=` for numbers from `low` to `high`."""
    return partial(_parse, float, lambda value: low <= value <= high, f"a number from {low:,.12g} to {high:,.12g}")


def _parse(kind: type[Any], fits: Callable[[Any], bool], expected: str, text: str) -> Any:
    with contextlib.suppress(ValueError):
        if fits(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")


positive = partial(_parse, float, lambda value: 0 < value < float("inf"), "a number above 0")
"""An argparse `type=` for numbers above 0."""


def add_checkpoint_choices(parser: argparse.ArgumentParser) -> None:
    """Add training's options for existing checkpoints."""
    group = parser.add_argument_group("if checkpoints exist (default: resume from the newest valid one)")
    group.add_argument("--restart", action="store_true", help="move them to a folder next to theirs and start over")
    changes = "resume even if tokenizer, model, precision, optimizer or trained towers differ from the checkpoint's"
    group.add_argument("--resume_weights_only", action="store_true", help=changes)
    skip = "skip the batches of steps A to B, e.g. those with a NaN loss"
    group.add_argument("--skip_steps", type=_steps, metavar="A-B", help=skip)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    with contextlib.suppress(ValueError):
        if 1 <= int(first) <= int(last or first):
            return int(first), int(last or first)
    raise argparse.ArgumentTypeError(f"expected a step or a range, such as 5 or 5-6, found {text!r}")
