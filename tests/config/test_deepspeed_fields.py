"""Mistakes inside DeepSpeed's sections are found when a run's JSON is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.arguments import with_field
from clap_ds.config.reference import deepspeed_reference
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError
from tests.conftest import micro_run

COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
ONE_CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.1], "cycle_max_lr": 1}}
# name that no field has → hint
TYPOS = {
    "bf16.Enabled": "'bf16.enabled'",
    # nothing in the section is similar
    "comms_logger.file": "expected one of debug, enabled",
    # another section has it
    "bf16.loss_scale": "'fp16.loss_scale'",
    "checkpoint.writer.buffer_size": "'checkpoint.writer.io_buffer_size'",
    "zero_optimization.offload_optimizer.devic": "'zero_optimization.offload_optimizer.device'",
}
# field, wrong value, word in the message
VALUES: list[tuple[str, Any, str]] = [
    # wrong types
    ("bf16.enabled", "auto", "Hugging Face"),
    ("bf16.enabled", 1, "boolean"),
    ("scheduler.params.warmup_num_steps", 1e3, "integer"),
    ("zero_optimization", False, "object"),
    # out of bounds
    ("gradient_clipping", float("nan"), "finite"),
    ("optimizer.params.betas", [0.9], "2 items"),
    ("optimizer.params.lr", 1e308, "less"),
    ("scheduler.params.total_num_steps", 10**20, "at most"),
    # none of the values
    ("checkpoint.tag_validation", "warm", "'WARN'"),
    ("optimizer.type", "sgd", "did you mean 'SGD'"),
    ("optimizer.type", "LBFGS", "no supported optimizer"),
    # missing fields
    ("scheduler", {"type": "WarmupLR"}, "params"),
    ("scheduler", {"params": {}}, "scheduler.type: missing"),
    # not supported here
    ("optimizer.params.max_grad_norm", 1.0, "gradient_clipping"),
    ("data_types.grad_accum_dtype", "fp32", "expected null"),
    ("elasticity", {"enabled": True}, "not supported: DeepSpeed has removed it"),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}, 'expected "none"'),
    # contradictions
    ("zero_optimization.stage3_max_live_parameters", 0, "its other name"),
    ("torch_autocast.enabled", True, "expected false, as bf16.enabled is true"),
]


@pytest.mark.parametrize(
    ("field", "value", "word"), [*((name, True, hint) for name, hint in TYPOS.items()), *VALUES]
)
def test_section_with_mistake_is_refused_with_field_and_expectation(field, value, word, tmp_path):
    path = tmp_path / "run.json"
    run = micro_run(scheduler=COSINE, zero_optimization={"stage": 0, "max_live_parameters": 1})
    path.write_text(json.dumps(with_field(run, field, value)))
    with pytest.raises(UserError) as refused:
        load_run(path)
    (message,) = str(refused.value).splitlines()
    assert field in message
    assert word in message


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": {"tag_validation": "Warn", "writer": {"io_buffer_size": 64e6}}},
        {"communication_data_type": "FP32", "gradient_clipping": 1, "steps_per_print": None},
        {"optimizer": {"type": "AdAmW", "params": {"lr": 0, "betas": [0, 0.9]}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 1e3}}},
        {"scheduler": ONE_CYCLE},
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}},
    ],
)
def test_section_with_documented_values_is_accepted(changes, write_run):
    load_run(write_run(**changes))


def test_deepspeed_reference_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "deepspeed_fields.md"
    assert page.read_text() == deepspeed_reference(), "regenerate it as its header says"
