"""The schema of `summary.json` and `metrics.jsonl`. Standard library only.

Any field can be absent, as in killed runs or older records. Times are in seconds, throughput in
samples/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

# `schema` in `summary.json`
# 6: the range in `Rates` renamed
# 5: fields renamed; `upgrade_summary` converts both
# 4: two presets renamed (`FORMER_PRESETS`)
# 3: throughput is samples over time (`mean`), before it the median of windows
# 1 has no `schema`
VERSION = 6
# preset in records up to schema 3 → its name now: `htsat_tiny_roberta_base` had LAION-CLAP's
# heads
FORMER_PRESETS = {
    "htsat_tiny_roberta_base": "clap_htsat_tiny_roberta_base",
    "htsat_tiny_roberta_base_fusion": "clap_htsat_tiny_roberta_base_fused",
}
# fields of `summary.json` before schema 5 → their names
_FORMER_FIELDS = {
    "text_tokens": "context_length",
    "stop_at": "target_metrics",
    "slow_ranks": "stragglers",
}
# fields of `Rates` before schema 6 → their names
_FORMER_RATES = {"low": "min", "high": "max"}
# `phase` of `metrics.jsonl` before schema 5 → its name
FORMER_PHASES = {"window": "timed"}
RECORD_FILES = ("summary.json", "metrics.jsonl", "config.json", "environment.json")
State = Literal["running", "completed", "out_of_memory", "failed", "timeout", "terminated"]
# phases of a step, in order
STEP_PHASES = (
    "data_wait", "forward", "feature_wait", "loss", "backward", "exposed_communication", "optimizer",
)  # fmt: skip


def upgrade_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary of any schema with today's names."""
    renamed = {_FORMER_FIELDS.get(name, name): value for name, value in summary.items()}
    rates = renamed.get("samples_per_s_per_gpu")
    if isinstance(rates, Mapping):
        renamed["samples_per_s_per_gpu"] = {
            _FORMER_RATES.get(name, name): value for name, value in rates.items()
        }
    return renamed


class Process(TypedDict, total=False):
    """What identifies rank 0's process (`clap_ds/run_records/lock.py`)."""

    pid: int
    host: str


class Environment(TypedDict, total=False):
    """Those fields of `environment.json` that analysis uses."""

    command: list[str]
    device_name: str
    device_names: list[str]
    git_commit: str | None
    hosts: list[str]
    num_nodes: int
    process: Process
    versions: dict[str, str | None]
    world_size: int


class Config(TypedDict, total=False):
    """Those fields of `config.json` that analysis uses."""

    clap: dict[str, Any]
    gradient_accumulation_steps: int
    train_micro_batch_size_per_gpu: int


class Rates(TypedDict, total=False):
    """Samples/s of one GPU: total samples over total seconds of the windows, and the windows'
    range."""

    mean: float
    min: float
    max: float
    windows: list[float]
    window_s: list[float]
    """Duration of each window on the slowest rank."""


class StepTime(TypedDict, total=False):
    """Step times over all timed steps: rank 0's, and the median of each step's slowest rank."""

    median: float
    p95: float
    slowest_rank_median: float


class Straggler(TypedDict):
    """By how much a rank's own step time, data wait included, exceeds the median rank's."""

    rank: int
    host: str
    lag_s: float
    lag_percent: float
    data_wait_s: float


class ChosenKernel(TypedDict):
    """The kernel chosen by `auto`, and why it isn't Triton's."""

    kernel: str
    problem: str | None


class Summary(TypedDict, total=False):
    """`summary.json`."""

    schema: int
    state: State
    error: str | None
    finished: str
    command: str
    preset: str
    num_nodes: int
    world_size: int
    micro_batch_per_gpu: int
    gradient_accumulation_steps: int
    global_batch: int
    context_length: int
    text_packing: bool
    precision: str
    device_name: str
    device_type: str
    kernels: dict[str, ChosenKernel]
    """On CUDA, per part (`attention`, `mlp`) whose implementation is `auto`."""
    compiled: dict[str, str | None]
    """Per part (`mel`, `audio`, `text`; in training also `evaluation`): null, or why it runs
    uncompiled."""
    compile_s: float
    # Throughput
    samples_per_s_per_gpu: Rates
    samples_per_s: float
    deepspeed_samples_per_s: float | None
    """Measured by DeepSpeed's timer on rank 0 in all windows after the second step, warm-up
    included."""
    step_time_s: StepTime
    data_wait_percent: float
    breakdown_s: dict[str, float] | None
    """Seconds per step by `STEP_PHASES` in an instrumented pass: mean over ranks, median over
    steps."""
    memory_peak_bytes: int
    """Tensors on a GPU, the process on a CPU; of the rank with the most."""
    memory_reserved_peak_bytes: int
    memory_context_bytes: int
    """Used on the GPU outside torch's allocator: CUDA's context, kernels, libraries, NCCL, and
    other processes."""
    energy_kwh: float
    """Of all GPUs by NVML's counters: in timed windows, in training of this start. Absent without a
    GPU."""
    joules_per_sample: float
    skipped_steps: int
    stragglers: list[Straggler]
    stragglers_cost_samples_per_s: float
    data: dict[str, Any]
    warnings: list[str]
    # FLOPs
    flops: dict[str, Any]
    """GFLOPs per sample: forward (`published_gflops`, `model_gflops`), forward and backward
    (`training_gflops`). Forward by DeepSpeed's profiler, if enabled: `deepspeed_published_gflops`,
    `deepspeed_gflops`."""
    mfu_published_percent: float | None
    """None for an open_clip model, too."""
    mfu_model_percent: float | None
    hfu_percent: float | None
    achieved_tflops: float
    hardware_tflops: float
    peak_tflops: float | None
    peak_source: str
    # Training
    step: int
    samples: int
    epoch: float | None
    train_s: float
    """Training time over all starts, like `time_to_target_s`."""
    loss: float
    epoch_samples: int | None
    evaluation: dict[str, Any]
    best: dict[str, Any] | None
    checkpoints: list[dict[str, Any]]
    resumed_from: str
    history: str
    resumed_at_step: int
    time_to_target_s: float | None
    stop_reason: str | None


class StepLine(TypedDict, total=False):
    """A line of `metrics.jsonl`: a step (`warmup`, `timed`, `breakdown`, `train`), an evaluation or
    a checkpoint.

    Times are rank 0's unless stated. Each line of a window repeats the `window_…` fields of the
    whole window.
    """

    phase: Literal["warmup", "timed", "breakdown", "train", "evaluation", "checkpoint"]
    step: int
    window: int | None
    window_s: float
    """Duration of the window on the slowest rank."""
    window_data_wait_s: float
    """Data wait in the window, on the rank that waited most."""
    time_s: float
    slowest_rank_time_s: float
    data_wait_s: float
    phases_s: dict[str, float]
    """`breakdown` step: seconds by `STEP_PHASES`, mean over ranks. Here `backward` includes
    `exposed_communication`: its time beyond a backward pass without communication, which may be
    negative."""
    loss: float
    memory_bytes: int
    samples: int
    epoch: float | None
    lr: float
    gradient_norm: float
    logit_scale: float
    chance: dict[str, float]
    skipped: bool
    profiled: bool
    """Whether a profiler slowed the step down, so that throughput doesn't count it."""
