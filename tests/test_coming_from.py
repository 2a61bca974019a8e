"""docs/coming_from.md names fields that exist, with values that they take; its template is a run that can be trained."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.reference import reference
from clap_ds.config.settings import load_run
from clap_ds.training.checks import problems_for_training

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| `--.*?\| (.*?) \| .*\|$", (ROOT / "docs" / "coming_from.md").read_text(), re.MULTILINE)
SHARDS = {"source": "shards", "shards": "a.tar", "tokenizer": "b"}
FIELDS = [found for row in ROWS for found in re.findall(r"`([\w.]+)(?:: ([^`]+))?`", row)]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_fields_are_there_and_take_these_values(field: str, value: str, write_run: Callable[..., Path]) -> None:
    *names, last = field.split(".")
    assert not names or re.search(rf"^## `{'.'.join(names)}`\n[^#]*^\| `{last}` ", reference(), re.MULTILINE)
    content: Any = {last: json.loads(value or "{}")}
    for name in reversed(names):
        content = {name: {**(SHARDS if name == "data" else {}), **content}}
    if value or not names:
        load_run(write_run(**{"bf16": {"enabled": False}, **content}))


def test_every_flag_has_a_field_or_none_and_the_template_can_be_trained() -> None:
    assert len(ROWS) >= 40
    assert all("`" in row or row == "none" for row in ROWS)
    assert problems_for_training(load_run(ROOT / "ds_configs" / "fine_tune.json"), 1) == []
