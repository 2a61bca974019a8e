"""The sections of `clap` in a run's JSON: name, type, default and meaning of every field.

`docs/reference.md` is made from them. Evaluations are configured here, so that their metrics' names
and directions stand here, too: settings and messages must know them without torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from clap_ds.config.model import ClapConfig, Section, load_preset, parse_sizes
from clap_ds.config.model_names import find_preset, list_presets

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Tower = Literal["audio", "text"]
NotBlank = Annotated[str, Field(pattern=r"\S")]
LocalFolder = Annotated[str, Field(pattern=r"^[/~$]")]
Template = Annotated[str, Field(pattern=r"\{\}")]
# open_clip's and LAION-CLAP's order
CAPTION_KEY = "text;caption;txt"


class ModelSettings(Section):
    """The model, and how its towers run in training."""

    preset: str | ClapConfig = "htsat_tiny_roberta_base"
    """A preset's name, published name (`HTSAT-tiny-Roberta-base`) or JSON, a `ClapModel`'s folder
    or `config.json`, or `open_clip:NAME`."""
    pretrained_text: bool = False
    """Initialize the text tower from the preset's pretrained weights (needs the Hub or its local
    cache)."""
    drop_path: Probability = 0.1
    """Stochastic depth of the last audio block, decreasing linearly to 0 at the first."""
    text_dropout: Probability = 0.1
    """Dropout of hidden states and attention weights in the text tower."""
    spec_augment: bool = True
    """Mask two stripes of up to 63 frames and two of up to 7 mel bins in training, as in
    LAION-CLAP."""
    attention_impl: Literal["auto", "sdpa", "matmul", "triton"] = "auto"
    """Window attention kernel. `auto`: on CPUs `clap.cpu_kernels` or `matmul`; on CUDA `triton` if
    it runs, else `sdpa`."""
    mlp_impl: Literal["auto", "torch", "triton_gelu", "triton"] = "auto"
    """MLP kernel. `triton`: fused in audio blocks of up to 128 channels; in others and in the text
    tower a product of the backward pass with GELU. `triton_gelu`: GELU only. `auto`: on CUDA the
    last one that runs, `triton` from compute capability 8.0."""
    text_attention_impl: Literal["auto", "torch", "triton"] = "auto"
    """Text attention kernel. `auto`: on CUDA `triton` if it runs, in 16 bits, for captions of up to
    128 tokens and from compute capability 8.0, else `torch`."""
    activation_checkpointing: list[Tower] = []
    """Towers with activation checkpointing per block, for less memory and about a third more
    compute."""

    @property
    def sizes(self) -> ClapConfig:
        return load_preset(self.preset) if isinstance(self.preset, str) else self.preset

    @field_validator("preset", mode="before")
    @classmethod
    def _read_preset(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return parse_sizes(value, "own")
        if not isinstance(value, str):
            return value
        preset = find_preset(value)
        # The content of other files is read now, so that a run that resumes elsewhere has it.
        return preset if preset in list_presets() else load_preset(value)


class EngineSettings(Section):
    """How the engine computes a step."""

    compile: Literal["auto", "off", "towers", "towers-max-autotune"] = "auto"
    """What torch.compile compiles: nothing, or mel front end and towers, forward and backward.
    `towers-max-autotune` is Inductor's mode `max-autotune-no-cudagraphs`. `auto`: `towers` on CUDA,
    else `off`."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """This project's bf16 CPU kernels. `auto`: if the CPU has AMX or AVX-512; `off`: torch's
    operations."""
    optimizer_implementation: Literal["torch", "deepspeed"] = "torch"
    """AdamW implementation: torch's, or DeepSpeed's, which is compiled at first use."""
    gradient_sync: Literal["overlap", "deepspeed"] = "overlap"
    """Gradient all-reduce: torch's reducer during the backward pass, or DeepSpeed after it."""
    bucket_cap_mb: PositiveFloat = 12.0
    """Bucket size of the overlapped all-reduce in MB; torch's default is 25."""
    max_logit_scale: Annotated[float, Field(ge=1)] = 100.0
    """Upper bound of the learned logit scale; the lower one is 1. Both as in LAION's and
    open_clip's training."""


class SyntheticData(Section):
    """Random waveforms (int16 until on the device) and captions, seeded per rank."""

    source: Literal["synthetic"]
    """Selects this kind of `data`."""
    placement: Literal["host", "device"] = "host"
    """`host`: batches are copied from (pinned) host memory every step; `device`: they are already
    on the device."""
    caption_lengths: PositiveInt | dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Tokens per caption without padding: a number, or a histogram {"length": weight}; null: all
    `context_length`."""
    num_batches: PositiveInt = 2
    """Distinct batches per rank, cycled."""
    num_workers: NonNegativeInt = 0
    """Processes per rank that copy the batches clip by clip, as a loader of files would, on the
    host; 0: none."""


class ShardData(Section):
    """WebDataset tars of encoded audio with captions."""

    source: Literal["webdataset"]
    """Selects this kind of `data`."""
    shards: str | list[str] | dict[str, PositiveFloat]
    """Tar files: a path, brace pattern (`train-{000..127}.tar`), wildcard or fsspec URL, or a list
    of these. Mixture: {"pattern": share of the samples}."""
    resampled: bool = False
    """Draw shards with replacement, each worker from all of them. Otherwise every sample comes once
    per epoch, if shards are local or have a `manifest.json`; without one, workers share
    whole shards."""
    caption_key: NotBlank = CAPTION_KEY
    """Where a clip's caption is: a field of its json, or `txt`. The first that isn't blank of
    several, separated by `;`."""
    tokenizer: str
    """Hub name or folder of a `transformers` tokenizer."""
    num_workers: NonNegativeInt = 8
    """Worker processes per rank; 0 decodes in the training process."""
    shuffle_buffer: NonNegativeInt = 1000
    """Samples held for shuffling in each worker."""
    audio_dtype: Literal["float32", "int16"] = "int16"
    """Type of audio sent to the device: `int16`, as in LAION-CLAP's training, rounds by up to
    1.5e-5. Both clip to ±1."""
    cache_gb: NonNegativeFloat = 50.0
    """Disk cache of remote shards per host in GB (1e9 bytes), in
    `$XDG_CACHE_HOME/clap_ds/shards`."""
    stage_to: LocalFolder | None = None
    """Folder on a disk of each host, such as `$SLURM_TMPDIR`, to which shards, local and remote,
    are copied when first read. Variables are those of each host. If the disk is full, the remaining
    shards are read from their source."""

    @property
    def has_epochs(self) -> bool:
        """Whether every sample comes once before any repeats, if shard sizes are known."""
        is_mixture = isinstance(self.shards, dict) and len(self.shards) > 1
        return not self.resampled and not is_mixture


DataSettings = Annotated[SyntheticData | ShardData, Field(discriminator="source")]


class LossSettings(Section):
    """The contrastive loss over the global batch."""

    kind: Literal["softmax", "sigmoid"] = "softmax"
    """`softmax`: symmetric cross entropy of CLIP and CLAP; `sigmoid`: SigLIP's pairwise loss with a
    learned bias."""


class BenchSettings(Section):
    """The benchmark protocol: warm-up steps, then `windows` timed windows of `steps_per_window`
    steps."""

    warmup_steps: NonNegativeInt = 10
    """Untimed steps at the start."""
    windows: Annotated[int, Field(ge=2)] = 10
    """Timed windows; samples/s is their total samples over their total seconds."""
    steps_per_window: PositiveInt = 5
    """Steps timed together between device synchronizations."""
    find_micro_batch: bool = False
    """On a GPU, first replace the micro-batch by the largest multiple of 8 with which both towers
    run eager."""
    breakdown_steps: NonNegativeInt = 5
    """Steps of the instrumented pass that breaks down a step's time; 0 skips it."""


class ProfileSettings(Section):
    """Steps that torch.profiler records to `profile/` in the run directory. They don't count in
    throughput. Under `nsys profile` they are marked for Nsight Systems instead."""

    start_step: Annotated[int, Field(ge=2)] = 12
    """First recorded step of training, counted from this start of the run; the profiler warms up in
    the step before it. A benchmark ignores it: its recorded steps follow all others."""
    steps: PositiveInt = 3
    """Recorded steps; each adds to the size of the trace."""
    memory: bool = False
    """Also write a snapshot of the CUDA allocator's memory; on a CPU, record allocations in the
    trace and in the table."""
    ranks: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]
    """Ranks to profile. The lowest one's table is printed."""

    def steps_from(self, first_step: int) -> range:
        """Return the numbers of the warm-up step and of the recorded ones, which begin with
        `first_step`."""
        return range(first_step - 1, first_step + self.steps)


class HardwareSettings(Section):
    """Peak throughput of the device, for MFU."""

    peak_tflops: PositiveFloat | None = None
    """Dense bf16 peak of one device in TFLOPS; null: looked up by the device's name."""


class OutputSettings(Section):
    """Location of run directories."""

    dir: str = "runs"
    """Folder of run directories, relative to the working folder."""
    run_name: str | None = None
    """Prefix of the run directory's name; null: the configuration file's name."""


class DebugSettings(Section):
    """Diagnostics for runs that hang or crash; slower, with long logs."""

    enabled: bool = False
    """Print Python stacks on crashes, make NCCL verbose, disable hang detection. Collectives time
    out after 5 minutes."""
    allow_mixed_code: bool = False
    """Run with a warning even if hosts have different code or versions of torch or DeepSpeed."""

    @property
    def collective_timeout_s(self) -> float:
        # Without debugging it must cover one rank's slow start: compiling, downloading.
        return 300.0 if self.enabled else 1800.0


class TrainSettings(Section):
    """Training length, initial weights and gradient accumulation."""

    max_samples: PositiveInt | None = None
    """Total audio–caption pairs to train on; set this or `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the data; set this or `max_samples`. Mixtures and `resampled` data have no
    epochs."""
    pretrained: str | None = None
    """Weights to start from: a `transformers.ClapModel` folder, a file of LAION-CLAP, open_clip or
    HTSAT, or a checkpoint, as a path or fsspec URL."""
    freeze: list[Tower] = []
    """Towers to freeze, with their projections; also in `bench.py`."""
    lr_scale: dict[Tower, PositiveFloat] = {}
    """Learning-rate factor per tower, e.g. {"text": 0.1}. Projections are not scaled."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of the weights (0.999: about 1,000 steps), which evaluations and
    exports then use."""
    accumulation: Literal["plain", "gradcache"] = "plain"
    """`plain`: each micro-batch is a contrastive batch. `gradcache`: they form one, exactly
    (GradCache, arXiv 2101.06983)."""
    batch_ramp: list[Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]] = []
    """Global batch from a number of samples on, by gradient accumulation, e.g. [[0, 2048], [100000,
    4096]]. The last one is the run's own. `clap-ds plan --ramp` prints how many nodes each can
    use."""
    resume: str = "auto"
    """Checkpoint to resume from: a path or fsspec URL, or `auto` for the newest valid one in
    `clap.checkpoint.folder` or `remote_sync`."""
    target_metrics: dict[str, float] = {}
    """Metrics at which to stop, e.g. {"zero_shot_top1": 0.9}, if an evaluation reaches all; the
    time is recorded."""
    log_every_steps: PositiveInt = 10
    """Steps between progress lines and checks that the loss is finite."""
    histogram_every_steps: PositiveInt | None = None
    """Steps between TensorBoard histograms of each parameter and its averaged gradient before
    clipping; null: none."""


class CheckpointSettings(Section):
    """When and where checkpoints are saved, and which are kept."""

    folder: str | None = None
    """Folder of checkpoints; null: `<output.dir>/<run_name>-<hash of model, data, loss, seed,
    weights, freeze>-checkpoints`, or the folder of this name that a run has whose data or initial
    weights have moved."""
    every_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints; null: only by `every_minutes`, at the end or on a stop
    signal."""
    every_minutes: PositiveFloat | None = None
    """Minutes after which a checkpoint is saved if none by steps has been; null: only by
    `every_steps`."""
    keep_last: PositiveInt = 3
    """Newest checkpoints to keep."""
    keep_best: NonNegativeInt = 1
    """Best checkpoints by `best_metric` to keep in addition."""
    best_metric: str | None = None
    """Evaluation metric of the best checkpoint; null: `zero_shot_top1` if evaluated, else
    `retrieval_audio_to_text_r1`."""
    async_save: bool = True
    """Write checkpoints asynchronously from a copy in rank 0's host memory."""
    remote_sync: str | None = None
    """Folder or fsspec URL for copies of checkpoints, `history.jsonl`, TensorBoard's files and run
    directories. Runs without a local checkpoint resume from it. Credentials come only from the
    environment."""
    remote_sync_every_minutes: NonNegativeFloat = 0.0
    """Least minutes between such copies; the last checkpoint is always copied."""


class RetrievalSettings(Section):
    """Audio–text retrieval on held-out clips."""

    shards: str | list[str]
    """Tar files with `json` or `txt` captions; all captions of a clip are used."""
    caption_key: NotBlank = CAPTION_KEY
    """Where they are, as in `clap.data.caption_key`."""


class ZeroShotSettings(Section):
    """Zero-shot classification of held-out clips with captions made from class names."""

    shards: str | list[str]
    """Tar files with a `json` member per sample that contains its class."""
    class_key: str = "kind"
    """Field of that json with a class name, or a list of names (multi-label)."""
    templates: Annotated[list[Template], Field(min_length=1)] = [
        "{}",
        "the sound of {}",
        "a recording of {}",
    ]
    """Captions with {} for the class name; a class embedding is the mean over all its captions."""
    classes: dict[str, Annotated[list[NotBlank], Field(min_length=1)]] | None = None
    """Class name → its names in captions; null: classes found in the shards, with underscores as
    spaces."""


class EvaluationSettings(Section):
    """Evaluation during training and by `clap-ds evaluate`."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between evaluations in training; null: only at the end."""
    retrieval: RetrievalSettings | None = None
    zero_shot: ZeroShotSettings | None = None
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer; null: as in `clap.data`."""
    batch_size: PositiveInt | None = None
    """Clips per rank and forward pass; null: as in training."""
    num_workers: NonNegativeInt = 0
    """Decoding processes per rank."""


# contrastive loss of held-out clips and captions
RETRIEVAL_LOSS = "retrieval_loss"
# recalls at 1, 5 and 10, and mean average precision at 10
_MEASURES = ("r1", "r5", "r10", "map10")
RETRIEVAL = (
    *(f"retrieval_audio_to_text_{measure}" for measure in _MEASURES),
    *(f"retrieval_text_to_audio_{measure}" for measure in _MEASURES),
    RETRIEVAL_LOSS,
)
ZERO_SHOT = ("zero_shot_top1", "zero_shot_top5", "zero_shot_map")


def list_metrics(evaluation: EvaluationSettings) -> tuple[str, ...]:
    """Return an evaluation's metrics, the most informative first."""
    metrics: tuple[str, ...] = ()
    if evaluation.zero_shot:
        metrics += ZERO_SHOT
    if evaluation.retrieval:
        metrics += RETRIEVAL
    return metrics


def choose_best_metric(
    checkpoint: CheckpointSettings, evaluation: EvaluationSettings
) -> str | None:
    """Return the metric of the best checkpoint, or None if nothing is evaluated."""
    return checkpoint.best_metric or next(iter(list_metrics(evaluation)), None)


def to_higher_is_better(name: str, value: float) -> float:
    """Return the value, negated if smaller is better."""
    return -value if name == RETRIEVAL_LOSS else value
