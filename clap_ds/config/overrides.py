"""Copy a run's JSON with some fields changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError
from clap_ds.config.files import parse_json, read_object
from clap_ds.config.paths import find_config


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
            raise UserError(
                f"{name}: {'.'.join(sections[:depth])} is {json.dumps(inner)}, not an object"
            )
        section[inner_name] = {**inner}
        section = section[inner_name]
    section[field] = value
    return copy


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `a.b=1e-4` to name and value, a string unless valid JSON. Raises UserError without a
    name or `=`."""
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
    """Return a problem `FIELD: …` with where the field is: in `--set NAME=VALUE`, or else in the
    file."""
    field = problem.partition(":")[0]
    set_names = [parse_assignment(assignment)[0] for assignment in assignments]
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
    return name, [parse_assignment(f"{name}={value}")[1] for value in values.split(",")]
