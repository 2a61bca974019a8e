"""Parsers of commands, and argument types and options that commands share. Standard library
only."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from clap_ds.config.errors import did_you_mean
from clap_ds.config.paths import PACKAGE

COMMAND = "clap-ds"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one and doesn't describe it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        if (
            default is None
            or default is False
            or default in ([], argparse.SUPPRESS)
            or "default" in text
        ):
            return text
        values = default if isinstance(default, list | tuple) else [default]
        shown = " ".join(
            f"{value:g}" if isinstance(value, float) else str(value) for value in values
        )
        return f"{text} (default: {shown.replace('%', '%%')})"


class CommandParser(argparse.ArgumentParser):
    """A parser that takes options with dashes or underscores, and names the nearest option to an
    unknown one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = sys.argv[1:] if args is None else [*args]
        # What follows -- is another command's.
        num_options = arguments.index("--") if "--" in arguments else len(arguments)
        options = [self._replace_dashes(argument) for argument in arguments[:num_options]]
        return super().parse_known_args(options + arguments[num_options:], namespace)

    def _replace_dashes(self, argument: str) -> str:
        """Return `--batch_size=3` for `--batch-size=3`, and what is no option of this parser
        unchanged."""
        name, equals, value = argument.partition("=")
        option = "--" + name.removeprefix("--").replace("-", "_")
        is_option = name.startswith("--") and option in self._option_string_actions
        return f"{option}{equals}{value}" if is_option else argument

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            message += did_you_mean(unknown[1], self._option_string_actions, most_listed=0)
        super().error(message)


def make_parser(doc: str | None, subcommand: str = "") -> CommandParser:
    """Return the parser of a command. Its help is the docstring of its module: what it does, then
    examples and details."""
    description, _, details = inspect.cleandoc(doc or "").partition("\n\n")
    return CommandParser(
        prog=f"{command_name()} {subcommand}".strip(),
        description=description,
        epilog=details,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )


def command_name() -> str:
    """Return how the command was called: `clap-ds submit`, `launch/submit.py` or `python -m
    benchmarks.tune`."""
    script = Path(sys.argv[0]).resolve()
    if script.name == COMMAND or script == PACKAGE / "__main__.py":
        return " ".join([COMMAND, *sys.argv[1:2]])
    if module := getattr(sys.modules["__main__"], "__spec__", None):
        return f"python -m {module.name.removesuffix('.__main__')}"
    return (
        str(script.relative_to(PACKAGE.parent))
        if script.is_relative_to(PACKAGE.parent)
        else script.name
    )


def add_config(parser: argparse.ArgumentParser, *, required: bool = True, **options: Any) -> None:
    """Add the options that name a run's configuration (`config`) and change fields of it
    (`set`)."""
    names = ("--config", "--deepspeed_config")
    config_help = "read this configuration: a JSON file, or a packaged one by name (`clap-ds presets` lists them)"
    parser.add_argument(
        *names, type=Path, required=required, metavar="FILE", help=config_help, **options
    )
    set_help = "change a field of the configuration, such as clap.bench.windows=3; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=set_help)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for `files.show_results`."""
    json_help = "also write the results to this file, or with - print them instead"
    parser.add_argument("--json", type=Path, metavar="FILE", help=json_help)


def add_preset(parser: Any, purpose: str, default: str | None = None) -> None:
    """Add the option that names a model preset, to a parser or a group of its options."""
    preset_help = f"{purpose}: a preset's name, or a path (see `clap-ds presets`)"
    parser.add_argument("--preset", default=default, metavar="NAME", help=preset_help)


def whole_number(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """Return an argparse `type=` for whole numbers from `low`, up to `high` if given."""
    expected = (
        f"a whole number of at least {low}"
        if high is None
        else f"a whole number from {low} to {high}"
    )
    return partial(
        _parse, int, lambda value: low <= value and (high is None or value <= high), expected
    )


def number(low: float, high: float) -> Callable[[str], float]:
    """Return an argparse `type=` for numbers from `low` to `high`."""
    return partial(
        _parse,
        float,
        lambda value: low <= value <= high,
        f"a number from {low:,.12g} to {high:,.12g}",
    )


def _parse(kind: type[Any], fits: Callable[[Any], bool], expected: str, text: str) -> Any:
    with contextlib.suppress(ValueError):
        if fits(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")


positive = partial(_parse, float, lambda value: 0 < value < float("inf"), "a number above 0")
"""An argparse `type=` for numbers above 0."""


one_line = partial(
    _parse,
    str,
    lambda text: text.strip() and text.isprintable(),
    "text of printable characters only",
)
"""An argparse `type=` for texts that aren't blank, without line ends and other control
characters."""


def add_checkpoint_choices(parser: argparse.ArgumentParser) -> None:
    """Add training's options for existing checkpoints."""
    group = parser.add_argument_group(
        "if checkpoints exist (default: resume from the newest valid one)"
    )
    group.add_argument(
        "--restart", action="store_true", help="move them to a folder next to theirs and start over"
    )
    changes = "resume even if tokenizer, model, precision, optimizer or trained towers differ from the checkpoint's"
    group.add_argument("--resume_weights_only", action="store_true", help=changes)
    skip = "skip the batches of steps A to B, e.g. those with a NaN loss"
    group.add_argument("--skip_steps", type=_steps, metavar="A-B", help=skip)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    with contextlib.suppress(ValueError):
        if 1 <= int(first) <= int(last or first):
            return int(first), int(last or first)
    raise argparse.ArgumentTypeError(
        f"expected a step or a range, such as 5 or 5-6, found {text!r}"
    )
