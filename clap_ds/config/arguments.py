"""Types of command-line arguments, and options that commands share. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any


def whole_number(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """For `type=` of argparse: a whole number of at least `low`, and at most `high` where there is one."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return partial(_parse, int, lambda value: low <= value and (high is None or value <= high), expected)


def number(low: float, high: float) -> Callable[[str], float]:
    """For `type=` of argparse: a number from `low` to `high`."""
    return partial(_parse, float, lambda value: low <= value <= high, f"a number from {low:,.12g} to {high:,.12g}")


def _parse(kind: type[Any], fits: Callable[[Any], bool], expected: str, text: str) -> Any:
    with contextlib.suppress(ValueError):
        if fits(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")


positive = partial(_parse, float, lambda value: 0 < value < float("inf"), "a number above 0")
"""For `type=` of argparse: a number above 0."""


def add_checkpoint_choices(parser: argparse.ArgumentParser) -> None:
    """Options of training that has checkpoints: what to do with them."""
    group = parser.add_argument_group("where there are checkpoints (default: resume from the newest good one)")
    group.add_argument("--restart", action="store_true", help="move them into a folder beside theirs and start anew")
    changes = "resume though tokenizer, model, precision, optimizer or trained towers are others than the checkpoint's"
    group.add_argument("--resume_weights_only", action="store_true", help=changes)
    skip = "leave out the batches of steps A to B, such as those that gave a loss of NaN"
    group.add_argument("--skip_steps", type=_steps, metavar="A-B", help=skip)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    with contextlib.suppress(ValueError):
        if 1 <= int(first) <= int(last or first):
            return int(first), int(last or first)
    raise argparse.ArgumentTypeError(f"expected a step or two, such as 5 or 5-6, found {text!r}")
