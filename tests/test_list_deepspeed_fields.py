"""The table of DeepSpeed's fields is the installed DeepSpeed's, which accepts every default in
it."""

import json
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from list_deepspeed_fields import list_fields, record_parser
from pydantic import ValidationError

from clap_ds.config.deepspeed_fields import FIELDS, REFUSED, TABLE, make_deepspeed_model

BATCH = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
}


def collect_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a section with every field that has a default, except other names of a field."""
    section: dict[str, Any] = {}
    for name, field in fields.items():
        if "properties" in field:
            section[name] = collect_defaults(field["properties"])
        elif "default" in field and not field.keys() & {"alias", "deprecated"}:
            section[name] = field["default"]
    return section


def test_table_is_of_the_installed_deepspeed():
    table = json.loads(json.dumps(list_fields()))
    advice = "run `python .ci/list_deepspeed_fields.py`, then the command of the page in docs/"
    assert table == TABLE, advice


def test_every_name_that_deepspeed_reads_is_in_the_table_or_refused():
    refused = {name for name in REFUSED if "." not in name}
    assert record_parser().defaults.keys() == FIELDS.keys() | refused
    assert not FIELDS.keys() & refused


def test_deepspeed_parses_every_default_of_the_table():
    config = {**collect_defaults(FIELDS), **BATCH}
    config["optimizer"]["type"] = "AdamW"
    config["scheduler"] |= {"type": "WarmupLR", "params": {}}
    parsed = DeepSpeedConfig(config)
    field = FIELDS["zero_optimization"]["properties"]["reduce_bucket_size"]
    assert parsed.zero_config.reduce_bucket_size == field["default"]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("Adadelta", {"rho": 2}),
        ("Adafactor", {"eps": [-1, 0.1]}),
    ],
)
def test_argument_that_torch_rejects_is_rejected_by_the_table(kind, params):
    with pytest.raises(ValueError, match=r"Invalid|should"):
        getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(1))], **params)
    model: Any = make_deepspeed_model(kind, None)
    with pytest.raises(ValidationError):
        model.model_validate({"optimizer": {"type": kind, "params": params}})
