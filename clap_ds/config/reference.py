"""Command: `docs/reference.md`, every field of a run's `clap` section, made from the typed settings.

python -m clap_ds.config.reference > docs/reference.md
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import Section, sections_of
from clap_ds.config.settings import ClapSettings

HEAD = """# Every field of `clap`

A run's JSON is a DeepSpeed configuration and one more section, `clap`, whose fields these are. A field that is not there, here
or among DeepSpeed's, is refused before any rank starts. Made by `python -m clap_ds.config.reference`; don't edit.
"""


def reference() -> str:
    """The page, as Markdown: a table for each section."""
    return HEAD + "".join(_section("clap", ClapSettings))


def _section(path: str, section: type[Section]) -> Iterator[str]:
    yield f"\n## `{path}`\n\n{_plain(section.__doc__)}\n\n| field | expected | default | meaning |\n|---|---|---|---|\n"
    for name, field in section.model_fields.items():
        if not sections_of(field.annotation):
            default = "required" if field.is_required() else f"`{json.dumps(field.default, ensure_ascii=False)}`"
            expected = _expected(field.annotation, field.metadata)
            yield f"| `{name}` | {expected} | {default} | {_plain(field.description)} |\n"
    for name, field in section.model_fields.items():
        for kind in sections_of(field.annotation):
            yield from _section(f"{path}.{name}", kind)


def _expected(annotation: Any, metadata: list[Any]) -> str:
    """A type in words, with its bounds."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _expected(inner[0], [*getattr(inner[1], "metadata", []), *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(part, metadata) for part in inner)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin in (list, dict):
        kind = "list whose items" if origin is list else "object whose values"
        return f"{kind} are {_expected(inner[-1], [])}"
    words = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", type(None): "`null`"}
    words[ClapConfig] = "sizes"
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [f" {signs[name]} {getattr(item, name)}" for item in metadata for name in signs if hasattr(item, name)]
    return words[annotation] + (",".join(bounds) if annotation in (int, float) else "")


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
