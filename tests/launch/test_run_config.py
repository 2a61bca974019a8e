"""Copies of a run's JSON."""

import json
from pathlib import Path

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.run_config import main, parse_assignment, with_field


def test_fields_by_dotted_names() -> None:
    assert with_field({"a": {"b": 1, "c": 2}}, "a.b", 3) == {"a": {"b": 3, "c": 2}}
    assert with_field({}, "a.b.c", 3) == {"a": {"b": {"c": 3}}}
    with pytest.raises(UserError, match="not an object"):
        with_field({"a": 1}, "a.b", 3)
    assert parse_assignment("a.b=1e-4") == ("a.b", 1e-4)
    assert parse_assignment("a=text") == ("a", "text")
    for wrong in ("a", "=1", "a..b=1"):
        with pytest.raises(UserError, match="expected NAME=VALUE"):
            parse_assignment(wrong)


def test_command_fills_in_only_what_the_file_leaves_open(tmp_path: Path) -> None:
    source, output = tmp_path / "tiny.json", tmp_path / "out.json"
    source.write_text('{"clap": {"output": {"root": "/mine"}}}')
    assert main([str(source), "--output", str(output), "--root", "/site"]) == 0
    assert json.loads(output.read_text()) == {"clap": {"output": {"root": "/mine", "label": "tiny"}}}
    source.write_text('{"clap": {"output": {"label": "mine"}}}')
    assert main([str(source), "--output", str(output), "--root", "/site"]) == 0
    assert json.loads(output.read_text())["clap"]["output"] == {"root": "/site", "label": "mine"}
    assert main([str(source), "--output", str(output), "--label", "given"]) == 0
    assert json.loads(output.read_text())["clap"]["output"] == {"label": "given"}


def test_a_file_that_is_none_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "run.json"
    for text, message in ((None, ""), ("{", ":1:2: not valid JSON"), ("[]", ": expected a JSON object")):
        if text:
            source.write_text(text)
        assert main([str(source), "--output", str(tmp_path / "out.json")]) == 2
        assert f"error: {source}{message}" in capsys.readouterr().err
