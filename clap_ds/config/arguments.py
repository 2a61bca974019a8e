"""The command line: parsers, options and argument types that commands share, and `--set`.

`--set NAME=VALUE` changes a field of a run's JSON. Standard library only.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from clap_ds.utils.errors import UserError, did_you_mean
from clap_ds.utils.files import parse_json, read_object
from clap_ds.utils.paths import CONFIGS, PACKAGE

COMMAND = "clap-ds"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one and doesn't describe it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        has_none = default in (None, [], argparse.SUPPRESS) or default is False
        if has_none or "default" in text:
            return text
        values = default if isinstance(default, list | tuple) else [default]
        # 308.0 as 308
        texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        formatted = " ".join(texts)
        # argparse replaces `%(prog)s`.
        return f"{text} (default: {formatted.replace('%', '%%')})"


class CommandParser(argparse.ArgumentParser):
    """A parser that takes options with dashes or underscores, and names the nearest option to an
    unknown one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = sys.argv[1:] if args is None else [*args]
        # Arguments after -- are another command's.
        num_options = arguments.index("--") if "--" in arguments else len(arguments)
        arguments[:num_options] = map(self._replace_dashes, arguments[:num_options])
        return super().parse_known_args(arguments, namespace)

    def _replace_dashes(self, argument: str) -> str:
        """Return `--batch_size=3` for `--batch-size=3`, and other parsers' options unchanged."""
        name, equals, value = argument.partition("=")
        option = "--" + name.removeprefix("--").replace("-", "_")
        is_option = name.startswith("--") and option in self._option_string_actions
        return f"{option}{equals}{value}" if is_option else argument

    def error(self, message: str) -> NoReturn:
        # argparse's own message
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            message += did_you_mean(unknown[1], self._option_string_actions, most_listed=0)
        super().error(message)


def make_parser(doc: str | None, subcommand: str = "") -> CommandParser:
    """Return the parser of a command, whose help is the docstring of its module."""
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
    # `clap-ds` and `python -m clap_ds`
    if script.name == COMMAND or script == PACKAGE / "__main__.py":
        return " ".join([COMMAND, *sys.argv[1:2]])
    # `python -m` with another module
    if module := getattr(sys.modules["__main__"], "__spec__", None):
        return f"python -m {module.name.removesuffix('.__main__')}"
    if script.is_relative_to(PACKAGE.parent):
        return str(script.relative_to(PACKAGE.parent))
    return script.name


def add_config(parser: argparse.ArgumentParser, *, required: bool = True, **options: Any) -> None:
    """Add the options that name a run's configuration (`config`) and change fields of it
    (`set`)."""
    config_help = (
        "read this configuration: a JSON file, or a packaged one by name"
        " (`clap-ds presets` lists them)"
    )
    options |= {"type": Path, "metavar": "FILE", "help": config_help}
    parser.add_argument("--config", "--deepspeed_config", required=required, **options)
    set_help = "change a field of the configuration, such as clap.bench.windows=3; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=set_help)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for `files.show_results`."""
    json_help = "also write the results to this file, or with - print them instead"
    parser.add_argument("--json", type=Path, metavar="FILE", help=json_help)


def add_preset(parser: Any, purpose: str) -> None:
    """Add the option that names a model preset, to a parser or a group of its options."""
    preset_help = f"{purpose}: a preset's name, or a path (see `clap-ds presets`)"
    parser.add_argument("--preset", metavar="NAME", help=preset_help)


def add_checkpoint_choices(parser: argparse.ArgumentParser) -> None:
    """Add training's options for existing checkpoints."""
    title = "if checkpoints exist (default: resume from the newest valid one)"
    add = parser.add_argument_group(title).add_argument
    restart_help = "move them to a folder next to theirs and start over"
    add("--restart", action="store_true", help=restart_help)
    changes_help = (
        "resume even if tokenizer, model, precision, optimizer or trained towers differ from the"
        " checkpoint's"
    )
    add("--resume_weights_only", action="store_true", help=changes_help)
    skip_help = "skip the batches of steps A to B, e.g. those with a NaN loss"
    add("--skip_steps", type=_parse_steps, metavar="A-B", help=skip_help)


def _make_type(
    parse: Callable[[str], Any], is_valid: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    """Return an argparse `type=`: a function from an argument to its value."""

    def parse_valid(text: str) -> Any:
        with suppress(ValueError):
            value = parse(text)
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")

    return parse_valid


def whole_number(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """Return an argparse `type=` for whole numbers from `low`, up to `high` if given."""
    if high is None:
        return _make_type(int, lambda value: low <= value, f"a whole number of at least {low}")
    bounds = f"a whole number from {low} to {high}"
    return _make_type(int, lambda value: low <= value <= high, bounds)


def number(low: float, high: float) -> Callable[[str], float]:
    """Return an argparse `type=` for numbers from `low` to `high`."""
    bounds = f"a number from {low:,.12g} to {high:,.12g}"
    return _make_type(float, lambda value: low <= value <= high, bounds)


# an argparse `type=` for numbers above 0
positive = _make_type(float, lambda value: 0 < value < float("inf"), "a number above 0")
# an argparse `type=` for texts that aren't blank and have no control characters
one_line = _make_type(
    str, lambda text: text.strip() and text.isprintable(), "text of printable characters only"
)


def _parse_steps(text: str) -> tuple[int, int]:
    """Parse `5` or `5-6` to the first and the last step."""
    low, _, high = text.partition("-")
    with suppress(ValueError):
        steps = int(low), int(high or low)
        if 1 <= steps[0] <= steps[1]:
            return steps
    raise argparse.ArgumentTypeError(
        f"expected a step or a range, such as 5 or 5-6, found {text!r}"
    )


def i_of_n(text: str) -> tuple[int, int]:
    """Parse `2/8`, the second of eight parts, to both numbers."""
    number_text, _, count_text = text.partition("/")
    with suppress(ValueError):
        if 1 <= int(number_text) <= int(count_text):
            return int(number_text), int(count_text)
    raise argparse.ArgumentTypeError(
        f"expected I/N with I from 1 to N, such as 1/8 to 8/8, found {text!r}"
    )


def read_config(path: Path) -> dict[str, Any]:
    """Read a run's JSON, unchecked, by path or packaged name. Raises UserError."""
    return read_object(find_config(path))


def find_field(content: Any, name: str) -> Any:
    """Return the value of `a.b.c`, or None if it or one of its sections is missing."""
    for inner_name in name.split("."):
        content = content.get(inner_name) if isinstance(content, dict) else None
    return content


def with_field(content: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a copy with `a.b.c` set, creating sections as needed. Raises UserError if one isn't an
    object."""
    *sections, field = name.split(".")
    copy = {**content}
    section = copy
    for depth, inner_name in enumerate(sections, start=1):
        inner = section.get(inner_name, {})
        if not isinstance(inner, dict):
            path = ".".join(sections[:depth])
            raise UserError(f"{name}: {path} is {json.dumps(inner)}, not an object")
        section[inner_name] = {**inner}
        section = section[inner_name]
    section[field] = value
    return copy


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `a.b=1e-4` to name and value, which is a text unless it is valid JSON. Raises UserError
    without a name or `=`."""
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")):
        raise UserError(f"{text!r}: expected NAME=VALUE, such as optimizer.params.lr=1e-4")
    try:
        return name, parse_json(value)
    except ValueError:
        return name, value


def with_assignments(content: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return a copy with the fields of all `--set NAME=VALUE` set. Raises UserError."""
    try:
        for name, value in map(parse_assignment, assignments):
            content = with_field(content, name, value)
    except UserError as error:
        raise UserError(f"--set {error}") from None
    return content


def locate(problem: str, path: Path, assignments: Iterable[str]) -> str:
    """Return a problem `FIELD: …` with the field's place: `--set` if it was set there, or else the
    file."""
    field = problem.partition(":")[0]
    set_names = [parse_assignment(assignment)[0] for assignment in assignments]
    # A section that was set contains the field.
    is_set = any(f"{field}.".startswith(f"{name}.") for name in set_names)
    return f"--set {problem}" if is_set else f"{path}: {problem}"


def parse_varied(text: str) -> tuple[str, list[Any]]:
    """Parse `a.b=1,2` to name and values, which may be JSON lists. Raises UserError without a name
    or `=`."""
    name, _ = parse_assignment(text)
    values = text.partition("=")[2]
    if not values.strip():
        raise UserError(f"{text!r}: expected NAME=A,B, such as optimizer.params.lr=1e-4,3e-4")
    with suppress(ValueError):
        return name, parse_json(f"[{values}]")
    # Some of the values are texts without quotes.
    return name, [parse_assignment(f"{name}={value}")[1] for value in values.split(",")]


def find_config(path: Path) -> Path:
    """Return the path of a run's JSON: this file, or the packaged one of that name (`htsat_tiny`).
    Raises UserError with the packaged names if there is neither."""
    packaged = {file.stem: file for file in sorted(CONFIGS.glob("*.json"))}
    is_name = path.parent == Path() and path.suffix in ("", ".json")
    if is_name and path.stem in packaged and not path.is_file():
        return packaged[path.stem]
    if not path.exists():
        hint = did_you_mean(path.stem, packaged, most_listed=0)
        names = ", ".join(packaged)
        raise UserError(f"{path}: no such file{hint} (packaged configurations: {names})")
    return path
