"""Make pydantic models of DeepSpeed's fields from the table `deepspeed_fields.json`. Imports no
torch.

`.ci/list_deepspeed_fields.py` makes the table from DeepSpeed. It consists of JSON schemas, extended
by `required`, `alias` (the field's other name), `ignoreCase` (of an enumeration) and `strict` (of a
whole number: reject 1e3).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, create_model

from clap_ds.config.batch_sizes import NAMES
from clap_ds.config.model import Section
from clap_ds.utils.files import read_json

Schema = dict[str, Any]
TABLE = read_json(Path(__file__).with_name("deepspeed_fields.json"))
# schemas of the top-level fields of a run's JSON, except `clap`
FIELDS: Schema = TABLE["fields"]
# schemas of `params` by section (`optimizer`, `scheduler`), type and name
PARAMS: dict[str, dict[str, Schema]] = TABLE["params"]
# why a run can't set some fields that DeepSpeed knows, by dotted name
REFUSED: dict[str, str] = TABLE["refused"]
_TYPES: Schema = {
    "boolean": bool, "null": None, "number": float, "object": dict[str, Any], "string": str,
}  # fmt: skip
_JSON_TYPES: dict[type, str] = {list: "array", str: "string"}
# JSON schema's name of a bound → pydantic's
_BOUNDS = {
    "exclusiveMaximum": "lt", "exclusiveMinimum": "gt", "maximum": "le", "maxItems": "max_length", "minimum": "ge",
    "minItems": "min_length",
}  # fmt: skip
# that float32 holds: torch and DeepSpeed fail with larger ones; `settings.py` bounds whole numbers
_LARGEST = 3.4e38


class _DeepSpeedSection(Section):
    """Base of the models made here."""

    # The models have no source code to search for docstrings, which would take half a second.
    model_config = ConfigDict(use_attribute_docstrings=False)


def find_params(section: str, kind: str | None) -> Schema | None:
    """Return the schemas of `params` of a type, or None if it is unknown. DeepSpeed's own
    optimizers may be in any case."""
    kinds = PARAMS[section]
    return kinds.get(str(kind).lower(), kinds.get(str(kind)))


def find_kind(section: Any) -> str | None:
    """Return the type of an optimizer's or scheduler's section, or None if it has none."""
    kind = section.get("type") if isinstance(section, Mapping) else None
    return kind if isinstance(kind, str) else None


def _make_section(name: str, fields: Schema) -> type[Section]:
    types: Any = {}
    for field, schema in fields.items():
        # `...` means that the field is required.
        default = ... if schema.get("required") else None
        types[field] = (_make_type(field, schema), default)
    return create_model(name, __base__=_DeepSpeedSection, **types)


def _make_type(name: str, schema: Schema) -> Any:
    """Return the type that pydantic checks a field with."""
    if "anyOf" in schema:
        return _make_union(name, schema["anyOf"])
    if "properties" in schema:
        return _make_section(name, schema["properties"])
    if "enum" in schema:
        return _make_enum(schema["enum"], ignore_case=schema.get("ignoreCase", False))
    if schema["type"] == "array":
        plain: Any = list[_make_type(name, schema["items"])]  # type: ignore[misc]
    elif schema["type"] == "integer":
        plain = int if schema.get("strict") else Annotated[int, BeforeValidator(_to_whole)]
    else:
        plain = _TYPES[schema["type"]]
    bounds: Any = {argument: schema[key] for key, argument in _BOUNDS.items() if key in schema}
    if schema["type"] == "number":
        bounds.setdefault("le", _LARGEST)
    return Annotated[plain, Field(**bounds)]


def _to_whole(value: Any) -> Any:
    """Return 500000000 for 5e8, which DeepSpeed converts, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _make_enum(values: list[str], *, ignore_case: bool) -> Any:
    enum: Any = Literal[tuple(values)]
    if not ignore_case:
        return enum
    by_casefold = {value.casefold(): value for value in values}
    restore_case = lambda value: by_casefold.get(str(value).casefold(), value)  # noqa: E731
    return Annotated[enum, BeforeValidator(restore_case)]


def _make_union(name: str, schemas: list[Schema]) -> Any:
    """Return a type of one of several JSON types.

    About a wrong value, pydantic reports only the alternative of the value's JSON type, or else the
    first.
    """
    types = {schema.get("type", "object"): _make_type(name, schema) for schema in schemas}
    is_nullable = types.pop("null", None) is not None
    default_type, *further_types = types

    def choose_type(value: Any) -> str:
        json_type = _JSON_TYPES.get(type(value), "number")
        return json_type if json_type in types else default_type

    union: Any = types[default_type]
    if further_types:
        tagged = tuple(Annotated[types[json_type], Tag(json_type)] for json_type in types)
        union = Annotated[Union[tagged], Discriminator(choose_type)]  # noqa: UP007
    return Optional[union] if is_nullable else union  # noqa: UP045


def make_deepspeed_model(optimizer: str | None, scheduler: str | None) -> type[Section]:
    """Return a model of DeepSpeed's part of a run's JSON, without batch sizes. Its `params` are
    those of these types, if known."""
    fields = {name: schema for name, schema in FIELDS.items() if name not in NAMES}
    for section, kind in (("optimizer", optimizer), ("scheduler", scheduler)):
        params = find_params(section, kind)
        if params is not None:
            # DeepSpeed can't build a scheduler without `params`.
            schema = {"properties": params, "required": section == "scheduler"}
            fields[section] = {"properties": {**FIELDS[section]["properties"], "params": schema}}
    return _make_section("DeepSpeed", fields)
