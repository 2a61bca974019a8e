"""A run's JSON: a DeepSpeed configuration with a `clap` section, typed and checked before any rank starts work.

The only place that knows the names and defaults of `clap` fields. DeepSpeed's own sections stay in DeepSpeed's words
and reach it unchanged; of those only the few this project reads itself are looked at here. Imports neither torch nor
DeepSpeed, so that a wrong file is refused at once, also on a login node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from clap_ds.config.check import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    SettingsError,
    check_deepspeed,
    did_you_mean,
    explain,
    kind_of,
    read_json,
)
from clap_ds.config.model import ClapConfig, load_preset, preset_names
from clap_ds.config.places import find_config
from clap_ds.config.train_settings import CheckpointSettings, EvaluationSettings, TrainSettings

__all__ = ["ClapSettings", "DebugSettings", "RunSettings", "SettingsError", "ShardData", "SyntheticData", "load_run"]


class ModelSettings(Section):
    """Which model, and how its towers run while training."""

    preset: str = "htsat_tiny_roberta_base"
    text_from_hub: bool = False
    """Start the text tower from the preset's pretrained weights (needs a hub or its local cache)."""
    drop_path: Probability = 0.1
    """Stochastic depth of the last audio block; earlier blocks have linearly less (LAION's training default)."""
    text_dropout: Probability = 0.1
    """Dropout of RoBERTa's hidden states and attention weights."""
    spec_augment: bool = True
    """Mask two stripes of up to 64 frames and two of up to 8 mel bins in training, as LAION's training code does."""
    attention: Literal["auto", "sdpa", "matmul", "triton"] = "auto"
    """Kernel of the audio tower's window attention; `auto`: on a CPU `clap.cpu_kernels`' where they run and otherwise `matmul`,
    elsewhere `sdpa`. With `sdpa` the text tower goes through SDPA, too; packed captions need another."""
    checkpoint_activations: list[Literal["audio", "text"]] = []
    """Towers that keep only each block's input and compute the rest again in the backward pass: a third more work for those
    towers, for much less memory."""

    @field_validator("attention", mode="before")
    @classmethod
    def _check_attention(cls, kernel: object) -> object:
        if kernel == "native":
            raise ValueError("no kernel 'native' any more: leave 'auto', and clap.cpu_kernels 'auto' takes CPU kernels")
        return kernel

    @field_validator("preset")
    @classmethod
    def _check_preset(cls, name: str) -> str:
        if name not in preset_names():
            raise ValueError(f"no preset {name!r}{did_you_mean(name, preset_names())}")
        return name


class SyntheticData(Section):
    """Random waveforms and random captions, seeded per rank."""

    source: Literal["synthetic"]
    placement: Literal["host", "device"] = "host"
    """`host`: batches lie in (pinned) host memory and are copied every step; `device`: they are already there."""
    caption_lengths: PositiveInt | dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Real tokens per caption: a number, or a histogram {"length": weight}; null fills every one of `text_tokens`."""
    num_batches: PositiveInt = 2
    """Distinct batches per rank, used in turn."""


class ShardData(Section):
    """WebDataset tars of encoded audio with captions."""

    source: Literal["shards"]
    shards: str | list[str] | dict[str, PositiveFloat]
    """Tar files: a path, a brace pattern (`train-{000..127}.tar`), a wildcard, or a list of these; relative to the
    working folder, or any fsspec URL (`s3://…`; credentials come from the environment alone). A mixture:
    {"pattern": weight}, the weights being shares of the samples."""
    sampling: Literal["epochs", "replacement"] = "epochs"
    """`epochs`: shards are divided over ranks and workers, and no item comes again before all others of its worker have come: a
    worker that is through begins anew. `replacement`: every worker draws shards from all of them, again and again. Either way,
    an epoch is as many samples as the shards have items."""
    tokenizer: str
    """Hub name or folder of a `transformers` tokenizer."""
    num_workers: NonNegativeInt = 8
    """Worker processes per rank; 0 decodes in the training process."""
    shuffle_buffer: NonNegativeInt = 1000
    """Samples held for shuffling in each worker."""
    waveforms: Literal["float32", "int16"] = "float32"
    """How audio travels from the workers to the device: `int16` halves the copies, for a rounding error of 1.5e-5."""


_DATA_SOURCES: dict[str, type[BaseModel]] = {"synthetic": SyntheticData, "shards": ShardData}

DataSettings = Annotated[SyntheticData | ShardData, Field(discriminator="source")]


class LossSettings(Section):
    """The contrastive loss over the global batch."""

    kind: Literal["softmax", "sigmoid"] = "softmax"
    """`softmax`: CLIP's and CLAP's symmetric cross entropy; `sigmoid`: SigLIP's pairwise loss, with a learned bias."""
    features: Literal["bf16", "fp32"] | None = None
    """Type in which features travel and are compared; null: bf16 in bf16 runs, else fp32."""
    tile: PositiveInt = 4096
    """Columns of the similarity matrix held at a time."""


class BenchSettings(Section):
    """The measuring protocol: warm-up steps are dropped, then `windows` windows of `steps_per_window` steps are
    timed."""

    warmup_steps: NonNegativeInt = 10
    windows: Annotated[int, Field(ge=2)] = 10
    steps_per_window: PositiveInt = 5
    breakdown_steps: NonNegativeInt = 5
    """Steps of the second, instrumented pass that says where the time goes; 0 leaves it out."""


class HardwareSettings(Section):
    """What utilisation is held against."""

    peak_tflops: PositiveFloat | None = None
    """Dense bf16 peak of one device; null: from this project's table, by the device's name."""
    measure_peak: bool = False
    """Measure the device's matmul ceiling after the run (a few seconds) and show the rate as a share of it."""


class OutputSettings(Section):
    """Where the run directory is made."""

    root: str = "runs"
    label: str | None = None
    """First part of the run directory's name; the configuration file's name when null."""


class DebugSettings(Section):
    """What helps to find out why a run hangs or dies; costs some speed and much log."""

    enabled: bool = False
    """Python stacks of a crash, NCCL's log, and the stacks of every rank in the run directory as soon as one fails."""
    nccl_debug: Literal["WARN", "INFO", "TRACE"] = "INFO"
    nccl_debug_subsys: str = "INIT,NET,GRAPH,ENV"
    """Parts of NCCL that write to its log."""
    collective_timeout_s: PositiveInt = 300
    """Longest a collective may take; without debugging it is half an hour."""


class ClapSettings(Section):
    """What DeepSpeed has no word for."""

    model: ModelSettings = ModelSettings()
    text_tokens: Annotated[int, Field(ge=2)] = 77
    """Caption length, start and end token and padding included."""
    text: Literal["padded", "packed"] = "padded"
    """How captions go through the text tower: padded to `text_tokens`, as in the published runs, or packed without padding.
    Packed on CUDA in 16 bits, there is no dropout of attention weights."""
    compile: Literal["off", "towers", "step"] = "off"
    """What torch.compile is given: nothing, each tower, or the whole forward pass (and with it its backward pass)."""
    cuda_graphs: bool = False
    """Replay what is compiled as CUDA graphs, which spares the host launching every kernel. For shapes that don't vary: packed
    captions' do, and each is recorded anew. No effect on CPUs."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """This project's kernels for bf16 on CPUs, in both towers, the mel filters and AdamW; `auto`: where the processor has
    matrix units (AMX), `off`: torch's operations."""
    fused_adam: Literal["torch", "deepspeed"] = "torch"
    """Whose kernel steps AdamW: torch's, or DeepSpeed's own, which is compiled at first use. Where `optimizer.params` has
    `torch_adam`, DeepSpeed's wrapper walks torch's AdamW parameter by parameter, on either."""
    data: DataSettings = SyntheticData(source="synthetic")
    loss: LossSettings = LossSettings()
    gradient_sync: Literal["overlapped", "deepspeed"] = "overlapped"
    """Who averages gradients over ranks: torch's reducer under the backward pass, or DeepSpeed after it."""
    gradient_bucket_mb: PositiveFloat = 12.0
    """Most gradient bytes sent at a time when overlapped, in MB. The last bucket has no backward pass left to hide under, so
    less than torch's 25: measured to leave 12 to 21 % less exposed (`benchmarks.sync_bench`)."""
    bench: BenchSettings = BenchSettings()
    train: TrainSettings = TrainSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    hardware: HardwareSettings = HardwareSettings()
    output: OutputSettings = OutputSettings()
    debug: DebugSettings = DebugSettings()
    seed: NonNegativeInt = 0
    compile_cpu_collective: bool = False
    """Let DeepSpeed build its shared-memory all-reduce for CPU ranks on one host at first use (about a minute)."""
    max_logit_scale: PositiveFloat = 100.0
    """Upper bound of the learned logit scale, as in LAION's training code."""

    def preset(self) -> ClapConfig:
        """Sizes of the model."""
        return load_preset(self.model.preset)


class RunSettings:
    """One run: its `clap` section, typed, beside the DeepSpeed configuration, untouched.

    Attributes:
        path: the JSON file.
        clap: the typed section.
        deepspeed: everything else, as `deepspeed.initialize(config=…)` takes it.
    """

    def __init__(self, path: Path, clap: ClapSettings, deepspeed: dict[str, Any]) -> None:
        self.path = path
        self.clap = clap
        self.deepspeed = deepspeed

    @property
    def label(self) -> str:
        return self.clap.output.label or self.path.stem

    @property
    def micro_batch(self) -> int:
        """Samples per GPU and forward pass."""
        return int(self.deepspeed["train_micro_batch_size_per_gpu"])

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self.deepspeed.get("gradient_accumulation_steps", 1))

    @property
    def precision(self) -> str:
        """`bf16`, `fp16`, `torch_autocast_bfloat16` (fp32 parameters) or `fp32`, as DeepSpeed's sections say."""
        autocast = self.deepspeed.get("torch_autocast", {})
        if autocast.get("enabled"):
            return "torch_autocast_" + str(autocast.get("dtype", "bfloat16")).removeprefix("torch.")
        for name in ("bf16", "fp16"):
            if self.deepspeed.get(name, {}).get("enabled"):
                return name
        return "fp32"

    def without(self, section: str) -> RunSettings:
        """The same run with one of DeepSpeed's sections left out."""
        kept = {name: value for name, value in self.deepspeed.items() if name != section}
        return RunSettings(self.path, self.clap, kept)

    def resolved(self) -> dict[str, Any]:
        """The JSON with every default of `clap` filled in."""
        return {**self.deepspeed, "clap": self.clap.model_dump(mode="json")}


def load_run(path: str | Path) -> RunSettings:
    """Read and check a run's JSON, by its path or by the name of a packaged one.

    Raises:
        SettingsError: the file is missing or isn't JSON (with line and column), a field is unknown, misplaced, of the
        wrong
            type or of an impossible value.
    """
    try:
        path = find_config(Path(path))
    except FileNotFoundError as error:
        raise SettingsError(str(error)) from None
    content = read_json(path)
    clap_section = content.pop("clap", {})
    problems = check_deepspeed(content, list(ClapSettings.model_fields))
    clap = ClapSettings()
    if isinstance(clap_section, dict):
        try:
            clap = ClapSettings.model_validate(clap_section)
        except ValidationError as error:
            problems += [explain(details, ClapSettings, _DATA_SOURCES) for details in error.errors()]
    else:
        problems.append(f"clap: expected an object, found {kind_of(clap_section)}")
    if not problems:
        problems = _check_together(clap)
    if problems:
        raise SettingsError("\n".join(f"{path}: {problem}" for problem in problems))
    return RunSettings(path, clap, content)


def _check_together(clap: ClapSettings) -> list[str]:
    """Problems that only show when several fields are seen together."""
    problems = []
    longest = clap.preset().text.max_tokens
    if clap.text_tokens > longest:
        problems.append(f"clap.text_tokens: {clap.model.preset} has positions for {longest}, found {clap.text_tokens}")
    if clap.text == "packed" and clap.model.attention == "sdpa":
        problems.append(
            "clap.text: packed captions need clap.model.attention 'auto', 'matmul' or 'triton', found 'sdpa'"
        )
    if clap.cuda_graphs and clap.compile == "off":
        problems.append("clap.cuda_graphs: needs clap.compile 'towers' or 'step', whose graphs it replays")
    if clap.cuda_graphs and clap.train.accumulation == "cached":
        problems.append(
            "clap.cuda_graphs: a replay overwrites the features that clap.train.accumulation 'cached' keeps"
        )
    if isinstance(clap.data, SyntheticData):
        problems += _check_caption_lengths(clap.data.caption_lengths, clap.text_tokens)
    if clap.train.samples is not None and clap.train.epochs is not None:
        problems.append("clap.train: give samples or epochs, not both")
    problems += [
        f"clap.train.batch_ramp: expected numbers of samples, at least 0, found {start!r}"
        for start in clap.train.batch_ramp
        if not start.isdecimal()
    ]
    if set(clap.train.freeze) == {"audio", "text"}:
        problems.append("clap.train.freeze: both towers frozen leaves nothing to train")
    return problems


def _check_caption_lengths(lengths: int | dict[str, float] | None, text_tokens: int) -> list[str]:
    field = "clap.data.caption_lengths"
    names = list(lengths) if isinstance(lengths, dict) else [] if lengths is None else [str(lengths)]
    problems = [
        f"{field}: expected lengths from 2 (start and end token) to text_tokens = {text_tokens}, found {name!r}"
        for name in names
        if not (name.isdecimal() and 2 <= int(name) <= text_tokens)
    ]
    if isinstance(lengths, dict) and not sum(lengths.values()) > 0:
        problems.append(f"{field}: the weights of the histogram add up to 0")
    return problems
