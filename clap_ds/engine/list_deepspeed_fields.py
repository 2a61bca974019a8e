"""Write `clap_ds/config/deepspeed_fields.json`: the fields of a DeepSpeed configuration that runs may set.

python -m clap_ds.engine.list_deepspeed_fields

Names, types, defaults and bounds are read from the installed DeepSpeed and torch. DeepSpeed parses some sections with pydantic
models, which have a JSON schema. For others, a dictionary records the names that DeepSpeed's parser asks for. The
`params` of optimizers and schedulers are arguments of their classes. `OVERRIDES` has what none of these tell. The result
contains JSON schemas, so that login nodes can check a run without DeepSpeed.
"""

from __future__ import annotations

import collections.abc
import inspect
from typing import Annotated, Any, get_type_hints

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
from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import PydanticUndefined

from clap_ds.config.files import write_object
from clap_ds.config.paths import PACKAGE, version
from clap_ds.engine.schedule import WarmupStableDecayLR

Schema = dict[str, Any]
TABLE_PATH = PACKAGE / "config" / "deepspeed_fields.json"

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
RECORDED = ("activation_checkpointing", "data_types", "flops_profiler", "timers", "torch_autocast")
"""Sections without a model; so are `checkpoint`, `optimizer` and `scheduler`."""
REFUSED = {
    **dict.fromkeys(ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS, "DeepSpeed has removed it"),
    "aio": "it configures offloading to NVMe, which needs ZeRO",
    "autotuning": "use `python -m benchmarks.tune`",
    "bfloat16": "use `bf16`, its present name",
    "data_efficiency": "`clap.data` selects and orders samples",
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
}
"""Fields that DeepSpeed reads or has removed, and why a run can't set them."""


def _enum(*values: str, **more: Any) -> Schema:
    return {"type": "string", "enum": [*values], **more}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def _or_list(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "array", "items": schema}]}


JSON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
BOOLEAN = {"type": "boolean"}
TEXT = {"type": "string"}
NUMBER = {"type": "number"}
AT_LEAST_0 = {"minimum": 0}
ABOVE_0 = {"exclusiveMinimum": 0}
COUNT = {"type": "integer", **ABOVE_0}
EXACT_COUNT = {**COUNT, "strict": True}
"""For classes that reject 1e3."""
KEPT = (
    "default", "deprecated", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "maxItems", "minimum", "minItems",
    "type",
)  # fmt: skip
"""Keys of a JSON schema that are checked."""
RATE = _or_list({"type": "number", **AT_LEAST_0})
DTYPE = _enum(*(name for name in ds_config.DtypeEnum._value2member_map_ if isinstance(name, str)))
COMMUNICATION_DTYPE = _or_null(_enum("fp16", "bf16", "fp32", ignoreCase=True))
CYCLE_HALF = _or_null({"type": "number", **AT_LEAST_0})

OVERRIDES: dict[str, Schema] = {
    "activation_checkpointing.number_checkpoints": _or_null({"type": "integer"}),
    "checkpoint.tag_validation": _enum(*ds_checkpoint.CHECKPOINT_TAG_VALIDATION_MODES, ignoreCase=True),
    "checkpoint.writer.type": _enum(*ds_checkpoint.CHECKPOINT_WRITER_TYPES, ignoreCase=True),
    "checkpoint.writer.data_parallel": _or_null(_enum(*ds_checkpoint.CHECKPOINT_DATA_PARALLEL_UNITS, ignoreCase=True)),
    "comet.mode": _or_null(_enum("get", "create", "get_or_create")),
    "comms_logger.prof_ops": {"items": TEXT},
    "communication_data_type": COMMUNICATION_DTYPE,
    "data_types.buffer_dtype": _or_null(DTYPE),
    "data_types.grad_accum_dtype": _or_null(DTYPE),
    "data_types.keep_in_fp32_modules": {"anyOf": [{"type": "array", "items": TEXT}, _enum("auto")]},
    "data_types.param_dtype": _or_null(DTYPE),
    "flops_profiler.output_file": _or_null(TEXT),
    "fp16.loss_scale": AT_LEAST_0,
    "fp16.loss_scale_window": ABOVE_0,
    "fp16.min_loss_scale": ABOVE_0,
    "gradient_accumulation_steps": _or_null(EXACT_COUNT),
    "gradient_allreduce_op": _enum(*ds_config.GRADIENT_ALLREDUCE_OP_SUPPORTED, ignoreCase=True),
    "gradient_clipping": AT_LEAST_0,
    "gradient_predivide_factor": ABOVE_0,
    "log_level": _or_null(_enum(*log_levels, ignoreCase=True)),
    "optimizer.legacy_fusion": {**BOOLEAN, "default": False},
    "optimizer.params": {"type": "object", "default": {}},
    "optimizer.type": TEXT,
    "scheduler.params": {"type": "object"},
    "scheduler.type": TEXT,
    "seq_parallel_communication_data_type": COMMUNICATION_DTYPE,
    "steps_per_print": _or_null(EXACT_COUNT),
    "torch_autocast.dtype": DTYPE,
    "torch_autocast.lower_precision_safe_modules": {"type": "array", "items": TEXT},
    "train_batch_size": _or_null(EXACT_COUNT),
    "train_micro_batch_size_per_gpu": _or_null(EXACT_COUNT),
    "zero_optimization.leaf_module.classes": _or_list(TEXT),
    "zero_optimization.leaf_module.names": _or_list(TEXT),
    "zero_optimization.leaf_module.name_suffixes": _or_list(TEXT),
    "zero_optimization.stage": {"type": "integer"},  # `_check_deepspeed` explains why it is 0
    "zero_optimization.zenflow.select_strategy": _enum("auto", "step", "epoch"),
    "zero_optimization.zenflow.select_interval": {"anyOf": [COUNT, _enum("auto")]},
    "zero_optimization.zenflow.update_interval": {"anyOf": [COUNT, _enum("auto")]},
}
"""By path: JSON schemas, or parts of them, that the parser or the model doesn't have."""
PARAM_OVERRIDES: dict[str, Schema] = {
    **dict.fromkeys(("eps", "initial_accumulator_value", "lr", "lr_decay", "momentum", "weight_decay"), AT_LEAST_0),
    **dict.fromkeys(("momentum_decay", "rho", "cos_min_ratio", "min_ratio", "warmup_min_ratio"), AT_LEAST_0),
    **dict.fromkeys(("cycle_max_lr", "cycle_max_mom", "cycle_min_lr", "cycle_min_mom"), RATE),
    **dict.fromkeys(("lr_range_test_min_lr", "warmup_min_lr"), RATE),
    **dict.fromkeys(("cycle_first_step_size", "decay_num_steps", "decay_power", "step_size", "step_size_up"), ABOVE_0),
    **dict.fromkeys(("T_max", "total_num_steps"), ABOVE_0),
    **dict.fromkeys(("T_0", "T_mult", "lr_range_test_step_size", "warmup_num_steps"), EXACT_COUNT),
    **dict.fromkeys(("epochs", "steps_per_epoch", "total_steps"), _or_null(EXACT_COUNT)),
    "Adafactor.eps": {},  # two numbers
    "WarmupStableDecayLR.warmup_num_steps": AT_LEAST_0,
    "betas": {"items": {**NUMBER, **AT_LEAST_0, "exclusiveMaximum": 1}},
    "cycle_second_stair_count": CYCLE_HALF,
    "cycle_second_step_size": CYCLE_HALF,
    "warmup_max_lr": {"anyOf": [*RATE["anyOf"], {"type": "null"}]},
    "warmup_type": _enum(lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE),
}
"""The same for `params`, by name, or by class and name. RATE is for arguments that may be a list with a value per group."""

ARGUMENTS_LEFT_OUT = ("max_grad_norm", "scale_fn")
"""DeepSpeed refuses the first, and JSON has no functions."""
CPU_STATES = {"fp32_optimizer_states": {**BOOLEAN, "default": True}}
ADAM = {**CPU_STATES, ds_config.TORCH_ADAM_PARAM: {**BOOLEAN, "default": False}}
ADAM_RATE = {**NUMBER, **AT_LEAST_0}
MUON = {
    **ADAM,
    ds_config.ADAM_W_MODE: {**BOOLEAN, "default": ds_config.ADAM_W_MODE_DEFAULT},
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "eps"), ADAM_RATE),
    "betas": {"type": "array", **PARAM_OVERRIDES["betas"], "minItems": 2, "maxItems": 2},
    "ns_method": _enum("gram", "standard"),
}
"""What DeepSpeed's engine reads of `optimizer.params` itself."""
OPTIMIZERS = {
    ds_config.ADAGRAD_OPTIMIZER: (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
    ds_config.ADAM_OPTIMIZER: (torch.optim.Adam, FusedAdam, DeepSpeedCPUAdam),
    ds_config.ADAMW_OPTIMIZER: (torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam),
    ds_config.LAMB_OPTIMIZER: (FusedLamb,),
    ds_config.LION_OPTIMIZER: (FusedLion, DeepSpeedCPULion),
}
"""By DeepSpeed's names, in any case. Those of mup need a model made for it."""
TORCH_OPTIMIZERS = ("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Others of torch need closures or sparse gradients."""
TORCH_SCHEDULERS = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR", "MultiStepLR",
    "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
)  # fmt: skip
"""Others of torch take functions or schedulers."""


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
    fields = _describe_recorded("", record_parser())
    optimizers = {kind: _describe_arguments(*classes) for kind, classes in OPTIMIZERS.items()}
    optimizers = {kind: {**params, **(ADAM if "adam" in kind else {})} for kind, params in optimizers.items()}
    torch_optimizers = {name: _describe_arguments(getattr(torch.optim, name)) for name in TORCH_OPTIMIZERS}
    schedulers = [getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES] + [WarmupStableDecayLR]
    schedulers += [getattr(torch.optim.lr_scheduler, name) for name in TORCH_SCHEDULERS]
    return {
        "deepspeed": version("deepspeed"),
        "fields": fields,
        "params": {
            "optimizer": {**optimizers, ds_config.MUON_OPTIMIZER: MUON, **torch_optimizers},
            "scheduler": {scheduler.__name__: _describe_arguments(scheduler) for scheduler in schedulers},
        },
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
    """Return JSON schemas of what a parser asked a section for, by name."""
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
        else:
            plain = {} if default is None else {"type": JSON_TYPES[type(default)], "default": default}
            schemas[name] = _combine(path, plain, OVERRIDES.get(path, {}))
    return schemas


def _describe_model(path: str, model: type[BaseModel]) -> Schema:
    """Return JSON schemas of a pydantic model's fields, by name and by alias, which states the name."""
    schemas: Schema = {}
    for name, field in model.model_fields.items():
        # The whole model has no JSON schema, because DeepSpeed keeps functions in its fields.
        annotation: Any = Annotated[(field.annotation, "", *field.metadata)]
        schema = TypeAdapter(annotation).json_schema()
        if field.default is not PydanticUndefined:
            schema["default"] = field.default
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("deprecated"):
            schema["deprecated"] = True
        schemas[name] = _inline(f"{path}.{name}", schema, schema.get("$defs", {}))
        if field.alias is not None:
            schemas[field.alias] = {**schemas[name], "alias": name}
    return dict(sorted(schemas.items()))


def _inline(path: str, schema: Schema, definitions: Schema) -> Schema:
    """Return a JSON schema with its references resolved, and without what the check doesn't read."""
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
    plain = {key: schema[key] for key in KEPT if key in schema}
    if "anyOf" in schema:
        plain["anyOf"] = [_inline(path, option, definitions) for option in schema["anyOf"]]
    if "items" in schema:
        plain["items"] = _inline(f"{path}[]", schema["items"], definitions)
    if "properties" in schema:
        properties = schema["properties"].items()
        return {"properties": {name: _inline(f"{path}.{name}", field, definitions) for name, field in properties}}
    return _combine(path, plain, OVERRIDES.get(path, {}))


def _describe_arguments(*classes: type) -> Schema:
    """Return JSON schemas of the classes' arguments after the first one, which is the optimizer or its parameters."""
    schemas: Schema = {}
    for cls in classes:
        # torch imports the names of some annotations only for type checkers.
        hints = get_type_hints(vars(cls)["__init__"], localns=vars(collections.abc))
        _, *parameters = inspect.signature(cls).parameters.values()
        for parameter in parameters:
            name = parameter.name
            if name not in ARGUMENTS_LEFT_OUT and name not in schemas:
                path = f"{cls.__name__}.{name}"
                override = PARAM_OVERRIDES.get(path, PARAM_OVERRIDES.get(name, {}))
                schemas[name] = _combine(path, _describe_argument(hints.get(name), parameter.default), override)
    return schemas


def _describe_argument(hint: Any, default: Any) -> Schema:
    """Return an argument's JSON schema from its annotation or, if that is missing or no JSON type, from its default."""
    presence = {"required": True} if default is inspect.Parameter.empty else {"default": default}
    if isinstance(default, tuple):
        numbers = _or_null(NUMBER) if None in default else NUMBER
        return {"type": "array", "items": numbers, "minItems": len(default), "maxItems": len(default), **presence}
    if hint is not None:
        try:
            return {**_inline("", TypeAdapter(hint).json_schema(), {}), **presence}
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
            pass  # such as a tensor
    if isinstance(default, int | float):
        return {"type": "boolean" if isinstance(default, bool) else "number", **presence}
    return presence


def _combine(path: str, plain: Schema, override: Schema) -> Schema:
    """Return a field's schema. An override replaces its type or adds bounds. Raises ValueError if neither has a type."""
    presence = {key: plain[key] for key in ("default", "required", "deprecated") if key in plain}
    has_type = override.keys() & {"type", "anyOf"}
    schema: Schema = {**({} if has_type else plain), **override, **presence}
    if path and not schema.keys() & {"type", "anyOf"} and not path.endswith("[]"):
        raise ValueError(f"{path}: DeepSpeed doesn't tell its type: add it to OVERRIDES")
    return schema


if __name__ == "__main__":
    write_object(TABLE_PATH, list_fields())
