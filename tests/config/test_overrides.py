"""Copies of a run's JSON."""

import pytest

from clap_ds.config.errors import UserError
from clap_ds.config.overrides import parse_assignment, parse_varied, with_field


def test_fields_by_dotted_names() -> None:
    assert with_field({"a": {"b": 1, "c": 2}}, "a.b", 3) == {"a": {"b": 3, "c": 2}}
    assert with_field({}, "a.b.c", 3) == {"a": {"b": {"c": 3}}}
    with pytest.raises(UserError, match="not an object"):
        with_field({"a": 1}, "a.b", 3)
    assert parse_assignment("a.b=1e-4") == ("a.b", 1e-4)
    assert parse_assignment("a=text") == ("a", "text")
    assert parse_varied("a.b=1e-4,3,off") == ("a.b", [1e-4, 3, "off"])
    assert parse_varied('a=[],["x","y"]') == ("a", [[], ["x", "y"]])
    for wrong in ("a", "=1", "a..b=1"):
        with pytest.raises(UserError, match="expected NAME=VALUE"):
            parse_assignment(wrong)
