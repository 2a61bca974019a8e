"""Mistakes inside DeepSpeed's sections are found when a run's JSON is read."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clap_ds.config.arguments import with_field
from clap_ds.config.deepspeed_fields import FIELDS, PARAMS, make_deepspeed_model
from clap_ds.config.reference import deepspeed_reference
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError
from tests.conftest import micro_run

WriteRun = Callable[..., Path]
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
ONE_CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
NAMES = {
    "activation_checkpointing.partitioned_activations": "'activation_checkpointing.partition_activations'",
    "bf16.enable": "'bf16.enabled'",
    "bf16.Enabled": "'bf16.enabled'",
    "checkpoint.tag_validaton": "'checkpoint.tag_validation'",
    "checkpoint.writer.buffer_size": "'checkpoint.writer.io_buffer_size'",
    "comms_logger.file": "expected one of debug, enabled",
    "comms_logger.prof_op": "'comms_logger.prof_ops'",
    "bf16.loss_scale": "'fp16.loss_scale'",
    "compile.deepcompil": "'compile.deepcompile'",
    "csv_monitor.output_pth": "'csv_monitor.output_path'",
    "data_types.grad_acum_dtype": "'data_types.grad_accum_dtype'",
    "flops_profiler.enable": "'flops_profiler.enabled'",
    "fp16.initial_scale": "'fp16.initial_scale_power'",
    "optimizer.param": "'optimizer.params'",
    "optimizer.params.beta": "'optimizer.params.betas'",
    "tensorboard.enable": "'tensorboard.enabled'",
    "timers.throughput.enable": "'timers.throughput.enabled'",
    "timers.troughput": "'timers.throughput'",
    "torch_autocast.enable": "'torch_autocast.enabled'",
    "wandb.projct": "'wandb.project'",
    "zero_optimization.offload_optimizer.devic": "'zero_optimization.offload_optimizer.device'",
    "zero_optimization.stag": "'zero_optimization.stage'",
}
"""Names that no field has, and the nearest."""
VALUES: list[tuple[str, Any, str]] = [
    ("bf16", True, "object"),
    ("bf16", None, "object"),
    ("bf16.enabled", "auto", "Hugging Face"),
    ("bf16.enabled", "yes", "boolean"),
    ("bf16.enabled", 1, "boolean"),
    ("checkpoint.tag_validation", "warm", "'WARN'"),
    ("communication_data_type", "fp6", "'fp16'"),
    ("comms_logger.prof_ops", "all_reduce", "list"),
    ("comms_logger.prof_ops", [3], "string"),
    ("data_types.keep_in_fp32_modules", "all", "auto"),
    ("flops_profiler.module_depth", 9, "less than or equal to 8"),
    ("flops_profiler.profile_step", True, "integer"),
    ("fp16.loss_scale", -1, "greater"),
    ("fp16.loss_scale_window", 0, "greater"),
    ("fp16.min_loss_scale", 0.5, "integer"),
    ("gradient_allreduce_op", "max", "'mean'"),
    ("gradient_clipping", "1", "number"),
    ("gradient_clipping", -1.0, "greater"),
    ("gradient_clipping", None, "number"),
    ("gradient_clipping", [1.0], "number"),
    ("gradient_clipping", float("nan"), "finite"),
    ("gradient_predivide_factor", 0, "greater"),
    ("log_level", "inof", "did you mean 'info'"),
    ("optimizer.params.betas", [0.9], "2 items"),
    ("optimizer.params.betas", [0.9, 1.5], "less than 1"),
    ("optimizer.params.lr", "nope", "number"),
    ("optimizer.params.lr", -1, "greater"),
    ("optimizer.params.lr", 1e308, "less"),
    ("optimizer.params.eps", float("inf"), "finite"),
    ("optimizer.params.weight_decay", -1, "greater"),
    ("optimizer.params.weight_decay", float("nan"), "finite"),
    ("optimizer.params.max_grad_norm", 1.0, "gradient_clipping"),
    ("optimizer.type", "AdmW", "did you mean 'adamw'"),
    ("optimizer.type", "sgd", "did you mean 'SGD'"),
    ("optimizer.type", "LBFGS", "no supported optimizer"),
    ("scheduler", {"type": "WarmupLR"}, "params"),
    ("scheduler", {"params": {}}, "scheduler.type: missing"),
    ("scheduler.params.total_num_steps", 0, "greater"),
    ("scheduler.params.total_num_steps", 10**20, "at most"),
    ("scheduler.params.warmup_num_steps", 1e3, "integer"),
    ("scheduler.params.warmup_type", "linera", "did you mean 'linear'"),
    ("steps_per_print", 1.5, "integer"),
    ("tensorboard.output_path", 3, "string"),
    ("torch_autocast.dtype", "bfloat61", "did you mean 'bfloat16'"),
    ("wall_clock_breakdown", "true", "boolean"),
    ("zero_optimization", False, "object"),
    ("zero_optimization.compute_grad_norm", False, "expected true"),
    ("zero_optimization.offload_optimizer.device", "gpu", "'cpu'"),
    ("zero_optimization.reduce_bucket_size", 0, "greater"),
    ("zero_optimization.reduce_bucket_size", "5e8", "integer"),
    ("zero_optimization.stage3_max_live_parameters", 0, "its other name"),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}, 'expected "none"'),
    ("zero_optimization.offload_param", {"device": "cpu"}, "needs ZeRO"),
    ("zero_optimization.cpu_offload", True, "needs ZeRO"),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, "needs ZeRO"),
    ("data_types.grad_accum_dtype", "fp32", "expected null"),
    ("data_types.buffer_dtype", "fp16", "front end"),
    ("torch_autocast.enabled", True, "as bf16.enabled is true"),
]
"""Fields, values that they don't take, and what the message says."""
JSON_VALUES = {
    "boolean": True,
    "number": 2.5,
    "string": "x",
    "null": None,
    "array": [[]],
    "object": {"x": 1},
}


@pytest.mark.parametrize(
    ("field", "value", "word"), [*((name, True, near) for name, near in NAMES.items()), *VALUES]
)
def test_mistake_in_a_section_is_refused_with_its_path(
    field: str, value: Any, word: str, tmp_path: Path
) -> None:
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
        {
            "zero_optimization": {
                "stage": 0,
                "reduce_bucket_size": 5e8,
                "leaf_module": {"classes": "x"},
            }
        },
        {
            "checkpoint": {
                "tag_validation": "Warn",
                "writer": {"type": "fast", "io_buffer_size": 64e6},
            }
        },
        {
            "communication_data_type": "FP32",
            "log_level": "INFO",
            "gradient_clipping": 1,
            "steps_per_print": None,
        },
        {"data_types": {"keep_in_fp32_modules": ["norm"], "grad_accum_dtype": None}},
        {
            "optimizer": {
                "type": "AdAmW",
                "params": {"lr": 0, "torch_adam": True, "betas": [0, 0.9]},
            }
        },
        {
            "optimizer": {"type": "SGD"},
            "scheduler": {"type": "StepLR", "params": {"step_size": 1e3}},
        },
        {"scheduler": {**ONE_CYCLE, "params": {"cycle_min_lr": [0.1, 0.1], "cycle_max_lr": 1}}},
        {"scheduler": {}},
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}},
    ],
)
def test_what_deepspeed_documents_is_accepted(changes: dict[str, Any], write_run: WriteRun) -> None:
    load_run(write_run(**changes))


def test_fields_that_exclude_each_other_are_refused(write_run: WriteRun) -> None:
    with pytest.raises(UserError, match=r"fp16\.enabled: expected false"):
        load_run(write_run(bf16={"enabled": True}, fp16={"enabled": True}))
    with pytest.raises(UserError, match=r"torch_autocast\.enabled: expected false"):
        load_run(
            write_run(
                bf16={"enabled": False}, fp16={"enabled": True}, torch_autocast={"enabled": True}
            )
        )
    with pytest.raises(UserError, match=r"bf16\.bf16_optimizer_states: expected false"):
        load_run(write_run(bf16={"enabled": True, "bf16_optimizer_states": True}))
    with pytest.raises(UserError, match="elasticity: not supported: DeepSpeed has removed it"):
        load_run(write_run(elasticity={"enabled": True}))


def find_leaves(path: str, fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted names and schemas of the fields of all sections."""
    for name, field in fields.items():
        for option in field.get("anyOf", [field]):
            if "properties" in option:
                yield from find_leaves(f"{path}{name}.", option["properties"])
        if "properties" not in field:
            yield path + name, field


def list_types(field: dict[str, Any]) -> set[str]:
    """Return the JSON types that a field takes; every whole number is a number."""
    types = {option.get("type", "object") for option in field.get("anyOf", [field])}
    return types | {"number"} if "integer" in types else types


def reject(model: Any, field: str, value: Any) -> bool:
    """Return whether a field of the value is rejected, and only it."""
    try:
        model.model_validate(with_field({}, field, value))
    except ValidationError as error:
        return all(
            ".".join(map(str, details["loc"])).startswith(field) for details in error.errors()
        )
    return False


def test_every_field_rejects_typos_and_other_types_and_takes_its_default() -> None:
    model = make_deepspeed_model(None, None)
    leaves = [
        *find_leaves("", {name: field for name, field in FIELDS.items() if "batch" not in name})
    ]
    leaves = [
        leaf for leaf in leaves if leaf[0] != "gradient_accumulation_steps"
    ]  # `BatchSizes` checks these
    assert len(leaves) > 150
    for name, field in leaves:
        wrong = {
            kind: value for kind, value in JSON_VALUES.items() if kind not in list_types(field)
        }
        assert [kind for kind, value in wrong.items() if not reject(model, name, value)] == [], name
        assert reject(model, name[:-1], field.get("default")), name
        if "default" in field:
            model.model_validate(with_field({}, name, field["default"]))


@pytest.mark.parametrize(
    ("section", "kind"), [(section, kind) for section in PARAMS for kind in PARAMS[section]]
)
def test_every_param_rejects_other_types_and_takes_its_default(section: str, kind: str) -> None:
    params = PARAMS[section][kind]
    required = {"number": 0.5, "integer": 5, "array": [3]}
    values = {
        name: required[field.get("type", "number")]
        for name, field in params.items()
        if field.get("required")
    }
    chosen = {"optimizer": None, "scheduler": None, section: kind}
    model: Any = make_deepspeed_model(**chosen)
    whole = {section: {"type": kind, "params": values}}
    for name, field in params.items():
        for json_type, value in JSON_VALUES.items():
            if json_type not in list_types(field):
                with pytest.raises(ValidationError, match=name):
                    model.model_validate(with_field(whole, f"{section}.params.{name}", value))
        with pytest.raises(ValidationError, match=f"{name}_"):
            model.model_validate(with_field(whole, f"{section}.params.{name}_", None))
        if "default" in field:
            model.model_validate(with_field(whole, f"{section}.params.{name}", field["default"]))


def test_the_page_of_deepspeeds_fields_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "deepspeed_fields.md"
    assert page.read_text() == deepspeed_reference(), "regenerate it as its header says"
