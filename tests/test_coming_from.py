"""docs/coming_from.md names fields that exist, with values that they take; its template is a run that can be trained."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.check import DEEPSPEED_FIELDS
from clap_ds.config.files import parse_json
from clap_ds.config.sections import sections_of
from clap_ds.config.settings import ClapSettings, load_run
from clap_ds.training.checks import problems_for_training

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| `--.*?\| (.*?) \| .*\|$", (ROOT / "docs" / "coming_from.md").read_text(), re.MULTILINE)
FIELDS = [found for row in ROWS for found in re.findall(r"`([\w.]+)(?:: ([^`]+))?`", row)]


def test_every_flag_has_a_field_or_none() -> None:
    assert len(ROWS) >= 40
    assert all("`" in row or row == "none" for row in ROWS)


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_fields_are_there_and_take_these_values(field: str, value: str, write_run: Callable[..., Path]) -> None:
    first, *names = field.split(".")
    sections = [ClapSettings] if first == "clap" else []
    assert sections or first in DEEPSPEED_FIELDS
    for name in names:
        assert sections, field
        (known,) = {each.model_fields[name].annotation for each in sections if name in each.model_fields}
        sections = sections_of(known)
    if value:
        content: Any = parse_json(value)
        for name in reversed(names):
            more = {"source": "shards", "shards": "a.tar", "tokenizer": "b"} if name == "data" else {}
            content = {name: {**more, **content} if more else content}
        changes = {"bf16": {"enabled": False}} if first in ("fp16", "torch_autocast") else {}
        load_run(write_run(**{**changes, first: content}))


def test_the_template_can_be_trained() -> None:
    assert problems_for_training(load_run(ROOT / "ds_configs" / "fine_tune.json"), 1) == []
