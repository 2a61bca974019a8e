"""Write `clap_ds/config/deepspeed_fields.json`: the fields of a DeepSpeed configuration that runs
may set, as JSON schemas.

python .ci/list_deepspeed_fields.py

Names, types, defaults and bounds are read from the installed DeepSpeed and torch. DeepSpeed parses
some sections with pydantic models. For others, a dictionary records the names that DeepSpeed's
parser asks for, and defaults tell the types. The `params` of optimizers and schedulers are
arguments of their classes. `TYPES` and `PARAM_TYPES` have what these don't tell.
"""

from __future__ import annotations

import collections.abc
import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as ds_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.model_checkpointing import constants as ds_checkpoint
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from deepspeed.utils.logging import log_levels
from pydantic import BaseModel, Field, TypeAdapter
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from clap_ds.config.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from clap_ds.engine.factory import WarmupStableDecayLR
from clap_ds.utils.files import write_object
from clap_ds.utils.paths import PACKAGE, version

Schema = dict[str, Any]
TABLE_PATH = PACKAGE / "config" / "deepspeed_fields.json"
# keys of a JSON schema that are checked or shown
KEPT = (
    "default", "enum", "exclusiveMaximum", "exclusiveMinimum", "ignoreCase", "maximum", "maxItems", "minimum", "minItems",
    "strict", "type",
)  # fmt: skip
MODELS = {
    "bf16": DeepSpeedBF16Config,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "csv_monitor": CSVConfig,
    "fp16": DeepSpeedFP16Config,
    "tensorboard": TensorBoardConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "wandb": WandbConfig,
    "zero_optimization": DeepSpeedZeroConfig,
}
# sections without a model; so are `checkpoint`, `optimizer` and `scheduler`
RECORDED = ("activation_checkpointing", "data_types", "flops_profiler", "timers", "torch_autocast")
# fields that DeepSpeed reads or has removed, and why a run can't set them
REFUSED = {
    **dict.fromkeys(ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS, "DeepSpeed has removed it"),
    "aio": "it configures offloading to NVMe, which needs ZeRO",
    "autotuning": "use `python -m benchmarks.tune`",
    "bfloat16": "use `bf16`, its present name",
    "data_efficiency": "`clap.data` selects and orders samples",
    "data_types.buffer_dtype": "the audio front end computes in fp32",
    "data_types.param_dtype": "use `bf16.enabled` or `fp16.enabled`",
    "datastates_ckpt": "`clap.checkpoint` saves checkpoints",
    "expert_parallel": "the models have no experts",
    "hybrid_engine": "it generates text",
    "managed_gradient_accumulation": "the engine counts micro-batches",
    "optimizer.params.max_grad_norm": "use `gradient_clipping`",
    "pipeline": "training is data-parallel",
    "tensor_parallel": "training is data-parallel",
    "use_data_before_expert_parallelism": "the models have no experts",
    "vocabulary_size": "the model's preset has it",
    "weight_quantization": "it is for inference",
    "zero_optimization.cpu_offload": "it needs ZeRO stage 1 or higher",
    "zero_optimization.cpu_offload_param": "it needs ZeRO stage 3",
    "zero_optimization.offload_param": "it needs ZeRO stage 3",
    "zero_optimization.zenflow": "it needs ZeRO and an offloaded optimizer",
}


def _one_of(values: Collection[Any], *, ignore_case: bool = False) -> Any:
    """Return a type of these strings."""
    literal: Any = Literal
    extra: Any = {"ignoreCase": True} if ignore_case else {}
    return Annotated[
        literal[tuple(value for value in values if isinstance(value, str))],
        Field(json_schema_extra=extra),
    ]


# for readers that reject 1e3
ExactPositiveInt = Annotated[int, Field(gt=0, json_schema_extra={"strict": True})]
# a value, or one per parameter group
Rate = NonNegativeFloat | Annotated[list[NonNegativeFloat], Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Momentum = Fraction | Annotated[list[Fraction], Field(min_length=1)]
# torch's schedulers continue from another step only if the optimizer's groups have their
# initial rates.
NewSchedule = Annotated[int, Field(ge=-1, le=-1)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
DTYPE = _one_of(ds_config.DtypeEnum._value2member_map_)
COMMUNICATION_DTYPE = _one_of(("fp16", "bf16", "fp32"), ignore_case=True) | None

# types of fields whose default is null, or that DeepSpeed checks elsewhere
TYPES: dict[str, Any] = {
    "activation_checkpointing.number_checkpoints": int | None,
    "checkpoint.tag_validation": _one_of(
        ds_checkpoint.CHECKPOINT_TAG_VALIDATION_MODES, ignore_case=True
    ),
    "checkpoint.writer.type": _one_of(ds_checkpoint.CHECKPOINT_WRITER_TYPES, ignore_case=True),
    "checkpoint.writer.data_parallel": _one_of(
        ds_checkpoint.CHECKPOINT_DATA_PARALLEL_UNITS, ignore_case=True
    )
    | None,
    "comet.mode": Literal["get", "create", "get_or_create"] | None,
    "comms_logger.prof_ops": list[str],
    "communication_data_type": COMMUNICATION_DTYPE,
    "data_types.grad_accum_dtype": DTYPE | None,
    "data_types.keep_in_fp32_modules": list[str] | Literal["auto"],
    "flops_profiler.module_depth": Annotated[
        int, Field(ge=-1, le=8)
    ],  # deeper than all modules, it fails
    "flops_profiler.output_file": str | None,
    "fp16.loss_scale": NonNegativeFloat,
    "fp16.loss_scale_window": PositiveInt,
    "fp16.min_loss_scale": PositiveInt,
    "gradient_accumulation_steps": ExactPositiveInt | None,
    "gradient_allreduce_op": _one_of(ds_config.GRADIENT_ALLREDUCE_OP_SUPPORTED, ignore_case=True),
    "gradient_clipping": NonNegativeFloat,
    "gradient_predivide_factor": PositiveFloat,
    "log_level": _one_of(log_levels, ignore_case=True) | None,
    "optimizer.legacy_fusion": bool,
    "optimizer.params": dict[str, Any],
    "optimizer.type": str,
    "scheduler.params": dict[str, Any],
    "scheduler.type": str,
    "seq_parallel_communication_data_type": COMMUNICATION_DTYPE,
    "steps_per_print": ExactPositiveInt | None,
    "torch_autocast.dtype": DTYPE,
    "torch_autocast.lower_precision_safe_modules": list[str],
    "train_batch_size": ExactPositiveInt | None,
    "train_micro_batch_size_per_gpu": ExactPositiveInt | None,
    "zero_optimization.leaf_module.classes": str | list[str],
    "zero_optimization.leaf_module.name_suffixes": str | list[str],
    "zero_optimization.leaf_module.names": str | list[str],
    "zero_optimization.stage": int,  # `_check_deepspeed` explains why it is 0
}
# types of `params` by name, or by class and name, whose annotation is missing or wider
PARAM_TYPES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "adam_lr", "cos_min_ratio", "cycle_first_stair_count", "decay_lr_rate", "decay_step_size", "eps", "eta_min",
            "gamma", "initial_accumulator_value", "lr", "lr_decay", "lr_range_test_step_rate", "min_ratio", "momentum",
            "momentum_decay", "muon_lr", "power", "threshold", "warmup_min_ratio", "weight_decay",
        ),
        NonNegativeFloat,
    ),
    **dict.fromkeys(("cycle_second_stair_count", "cycle_second_step_size"), NonNegativeFloat | None),
    **dict.fromkeys(
        ("cycle_first_step_size", "decay_power", "div_factor", "final_div_factor"), PositiveFloat
    ),
    **dict.fromkeys(("pct_start", "rho"), Fraction),
    **dict.fromkeys(
        (
            "base_lr", "cycle_max_lr", "cycle_max_mom", "cycle_min_lr", "cycle_min_mom", "lr_range_test_min_lr", "max_lr",
            "min_lr", "warmup_min_lr",
        ),
        Rate,
    ),
    "warmup_max_lr": Rate | None,
    **dict.fromkeys(("base_momentum", "max_momentum"), Momentum),
    **dict.fromkeys(("cooldown", "patience", "total_iters"), NonNegativeInt),
    **dict.fromkeys(
        ("T_max", "decay_num_steps", "step_size", "step_size_up", "total_num_steps"), PositiveInt
    ),
    "step_size_down": PositiveInt | None,
    **dict.fromkeys(
        ("T_0", "T_mult", "lr_range_test_step_size", "warmup_num_steps"), ExactPositiveInt
    ),
    **dict.fromkeys(("epochs", "steps_per_epoch", "total_steps"), ExactPositiveInt | None),
    # by class and name
    "Adafactor.beta2_decay": Annotated[float, Field(le=0)],
    "Adafactor.d": Annotated[float, Field(ge=1)],
    "Adafactor.eps": Annotated[list[NonNegativeFloat | None], Field(min_length=2, max_length=2)],
    "ConstantLR.factor": PositiveFraction,
    "LinearLR.end_factor": Fraction,
    "LinearLR.start_factor": PositiveFraction,
    "MultiStepLR.milestones": list[NonNegativeInt],
    "RMSprop.alpha": Fraction,
    "ReduceLROnPlateau.factor": Annotated[float, Field(ge=0, lt=1)],
    "Rprop.etas": Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)],
    "Rprop.step_sizes": Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)],
    "WarmupStableDecayLR.min_ratio": Fraction,
    "WarmupStableDecayLR.warmup_num_steps": NonNegativeInt,
    # by name
    "adam_w_mode": bool,
    "betas": Betas,
    "fp32_optimizer_states": bool,
    "last_epoch": NewSchedule,
    "ns_method": Literal["gram", "standard"],
    "torch_adam": bool,
    "warmup_type": _one_of((lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE)),
}  # fmt: skip
# what DeepSpeed's engine reads of `optimizer.params` itself
ENGINE_PARAMS = {
    ds_config.ADAM_OPTIMIZER: ("torch_adam",),
    ds_config.ADAMW_OPTIMIZER: ("torch_adam",),
    ds_config.MUON_OPTIMIZER: (
        "lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "ns_method", "betas", "eps", "adam_w_mode", "torch_adam",
        "fp32_optimizer_states",
    ),
}  # fmt: skip
# DeepSpeed refuses the first, and JSON has no functions.
ARGUMENTS_LEFT_OUT = ("max_grad_norm", "scale_fn")
# By DeepSpeed's names, in any case. Those of mup need a model made for it.
OPTIMIZERS = {
    ds_config.ADAGRAD_OPTIMIZER: (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
    ds_config.ADAM_OPTIMIZER: (torch.optim.Adam, FusedAdam, DeepSpeedCPUAdam),
    ds_config.ADAMW_OPTIMIZER: (torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam),
    ds_config.LAMB_OPTIMIZER: (FusedLamb,),
    ds_config.LION_OPTIMIZER: (FusedLion, DeepSpeedCPULion),
    ds_config.MUON_OPTIMIZER: (),
}
# Others of torch need closures or sparse gradients.
TORCH_OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
# Others of torch take functions or schedulers.
TORCH_SCHEDULERS = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR", "MultiStepLR",
    "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
)  # fmt: skip


class RecordingDict(dict[str, Any]):
    """A configuration that records the names that its reader asks for, with their defaults."""

    def __init__(self, **content: Any) -> None:
        super().__init__(content)
        self.defaults: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        self.defaults.setdefault(str(name), None)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.defaults[name] = default
        return super().get(name, default)

    def keys(self) -> Any:
        return self  # for `name in config.keys()`


def list_fields() -> dict[str, Any]:
    """Return the content of `deepspeed_fields.json`."""
    optimizers = {kind: _describe_arguments(*classes) for kind, classes in OPTIMIZERS.items()}
    for kind, names in ENGINE_PARAMS.items():
        optimizers[kind] |= {name: _describe(name, PARAM_TYPES[name]) for name in names}
    for kind in TORCH_OPTIMIZERS:
        optimizers[kind] = _describe_arguments(getattr(torch.optim, kind))
    classes = [getattr(lr_schedules, kind) for kind in lr_schedules.VALID_LR_SCHEDULES]
    classes.append(WarmupStableDecayLR)
    classes += [getattr(torch.optim.lr_scheduler, kind) for kind in TORCH_SCHEDULERS]
    schedulers = {scheduler.__name__: _describe_arguments(scheduler) for scheduler in classes}
    return {
        "deepspeed": version("deepspeed"),
        "fields": _describe_recorded("", record_parser()),
        "params": {"optimizer": optimizers, "scheduler": schedulers},
        "refused": REFUSED,
    }


def record_parser() -> RecordingDict:
    """Return a configuration that DeepSpeed has parsed, with the names that it asked for."""
    config = RecordingDict(
        train_batch_size=1,
        checkpoint=RecordingDict(parallel_write=RecordingDict(), writer=RecordingDict()),
        optimizer=RecordingDict(type=ds_config.ADAM_OPTIMIZER),
        scheduler=RecordingDict(type=lr_schedules.WARMUP_LR),
        **{name: RecordingDict() for name in RECORDED},
    )
    ds_config.DeepSpeedConfig(config)
    return config


def _describe_recorded(prefix: str, section: RecordingDict) -> Schema:
    """Return JSON schemas of what a parser asked a section for, by name. Raises KeyError if `TYPES`
    lacks one."""
    schemas: Schema = {}
    for name, default in section.defaults.items():
        path = prefix + name
        inner = dict.get(section, name)
        if path in REFUSED:
            continue
        if path in MODELS:
            schemas[name] = {"properties": _describe_model(path, MODELS[path])}
        elif isinstance(inner, RecordingDict):
            schemas[name] = {"properties": _describe_recorded(f"{path}.", inner)}
        elif default is None:
            schemas[name] = _describe(path, TYPES[path])
        else:
            schemas[name] = _describe(path, TYPES.get(path, type(default)), default=default)
    return schemas


def _describe_model(path: str, model: type[BaseModel]) -> Schema:
    """Return JSON schemas of a pydantic model's fields, by name and by alias, which states the
    name."""
    schemas: Schema = {}
    for name, field in model.model_fields.items():
        if f"{path}.{name}" in REFUSED:
            continue
        # The whole model has no JSON schema, because DeepSpeed keeps functions in its fields.
        annotation: Any = Annotated[(field.annotation, "", *field.metadata)]
        presence: Schema = {} if field.default is PydanticUndefined else {"default": field.default}
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("deprecated"):
            presence["deprecated"] = True
        schemas[name] = _describe(f"{path}.{name}", annotation, **presence)
        if field.alias is not None:
            schemas[field.alias] = {**schemas[name], "alias": name}
    return dict(sorted(schemas.items()))


def _describe_arguments(*classes: type) -> Schema:
    """Return JSON schemas of the classes' arguments after the first one, which is the optimizer or
    its parameters."""
    schemas: Schema = {}
    for cls in classes:
        # torch imports the names of some annotations only for type checkers.
        hints = get_type_hints(vars(cls)["__init__"], localns=vars(collections.abc))
        _, *parameters = inspect.signature(cls).parameters.values()
        for parameter in parameters:
            name = parameter.name
            if name in ARGUMENTS_LEFT_OUT or name in schemas:
                continue
            default = parameter.default
            hint = _find_type(hints.get(name), default)
            hint = PARAM_TYPES.get(f"{cls.__name__}.{name}", PARAM_TYPES.get(name, hint))
            is_required = default is parameter.empty
            presence = {"required": True} if is_required else {"default": default}
            schemas[name] = _describe(name, hint, **presence)
    return schemas


def _find_type(hint: Any, default: Any) -> Any:
    """Return an argument's annotation, or its default's type if it has none or takes tensors."""
    if isinstance(default, tuple):
        return Annotated[list[float], Field(min_length=len(default), max_length=len(default))]
    if hint is None or "Tensor" in str(hint):
        return bool if isinstance(default, bool) else float
    return hint


def _describe(path: str, hint: Any, **presence: Any) -> Schema:
    """Return a type's JSON schema without references, and with what `presence` adds."""
    schema = TypeAdapter(TYPES.get(path, hint)).json_schema()
    plain = _inline(path, schema, schema.get("$defs", {}))
    if {"type": "null"} in plain.get("anyOf", []):
        presence = {"default": None, **presence}
    return {**plain, **presence}


def _inline(path: str, schema: Schema, definitions: Schema) -> Schema:
    """Return a JSON schema with its references resolved, and without what the check doesn't
    read."""
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    plain = {key: schema[key] for key in KEPT if key in schema}
    if "anyOf" in schema:
        plain["anyOf"] = [_inline(path, option, definitions) for option in schema["anyOf"]]
    if "items" in schema:
        plain["items"] = _inline(path, schema["items"], definitions)
    if "properties" not in schema:
        return plain
    properties: Schema = {}
    for name, field in schema["properties"].items():
        inner_path = f"{path}.{name}"
        if inner_path in TYPES:
            default = {"default": field["default"]} if "default" in field else {}
            properties[name] = _describe(inner_path, TYPES[inner_path], **default)
        else:
            properties[name] = _inline(inner_path, field, definitions)
    return {"properties": properties}


if __name__ == "__main__":
    write_object(TABLE_PATH, list_fields())
