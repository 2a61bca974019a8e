"""The sections of `clap`: every field's name, type and default, and beside it what it means.

`docs/reference.md` is made from these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from clap_ds.config.model import ClapConfig, load_preset, parse_sizes
from clap_ds.config.model_names import preset_names, preset_of

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Tower = Literal["audio", "text"]
NotBlank = Annotated[str, Field(pattern=r"\S")]
Template = Annotated[str, Field(pattern=r"\{\}")]


class Section(BaseModel):
    """Base of every `clap` section: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def sections_of(annotation: Any) -> list[type[Section]]:
    """The sections that a field's type is made of: one, where it may be null, too; one for each kind of `data`; or none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


class ModelSettings(Section):
    """Which model, and how its towers run while training."""

    preset: str | ClapConfig = "htsat_tiny_roberta_base"
    """Sizes of the model: one of `clap_ds/config/presets`, also by its published name (`HTSAT-tiny-Roberta-base`); or the path
    of a JSON like these, or of a `transformers.ClapModel`'s folder or `config.json`."""
    pretrained_text: bool = False
    """Start the text tower from the preset's pretrained weights (needs a hub or its local cache)."""
    drop_path: Probability = 0.1
    """Stochastic depth of the last audio block; earlier blocks have linearly less (LAION's training default)."""
    text_dropout: Probability = 0.1
    """Dropout of the text tower's hidden states and attention weights."""
    spec_augment: bool = True
    """Mask two stripes of up to 64 frames and two of up to 8 mel bins in training, as LAION's training code does."""
    attention_impl: Literal["auto", "sdpa", "matmul", "triton"] = "auto"
    """Kernel of the audio tower's window attention; `auto`: on a CPU `matmul` (or `clap.cpu_kernels`' where they run), on CUDA
    `triton` where it compiles and runs, else `sdpa`."""
    mlp_impl: Literal["auto", "torch", "triton"] = "auto"
    """Kernel of the audio blocks' MLPs: `torch`, operation by operation, or `triton`, which fuses those up to 256 channels wide
    and keeps no hidden activations. `auto`: on CUDA `triton` where it compiles and runs, elsewhere `torch`."""
    activation_checkpointing: list[Tower] = []
    """Towers that keep only each block's input and compute the rest again backward: a third more work, much less memory."""

    @field_validator("preset", mode="before")
    @classmethod
    def _preset_of(cls, given: Any) -> Any:
        """A path is read here and now, so that what the run has is what its record says, wherever it is resumed."""
        if isinstance(given, dict):
            return parse_sizes(given, "own")
        is_path = isinstance(given, str) and preset_of(given) not in preset_names()
        return load_preset(given) if is_path else preset_of(given) if isinstance(given, str) else given


class SyntheticData(Section):
    """Random waveforms, in int16 until they are on the device, and random captions, seeded per rank."""

    source: Literal["synthetic"]
    """Which of the two kinds of `data` this is."""
    placement: Literal["host", "device"] = "host"
    """`host`: batches lie in (pinned) host memory and are copied every step; `device`: they are already there."""
    caption_lengths: PositiveInt | dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Real tokens per caption: a number, or a histogram {"length": weight}; null fills every one of `context_length`."""
    num_batches: PositiveInt = 2
    """Distinct batches per rank, used in turn."""


class ShardData(Section):
    """WebDataset tars of encoded audio with captions."""

    source: Literal["webdataset"]
    """Which of the two kinds of `data` this is."""
    shards: str | list[str] | dict[str, PositiveFloat]
    """Tar files: a path, a brace pattern (`train-{000..127}.tar`), a wildcard, any fsspec URL, or a list of these. A mixture:
    {"pattern": weight}, the weights being shares of the samples."""
    resampled: bool = False
    """Whether every worker draws shards from all of them, with replacement. If not, every item comes once in each epoch, for
    which shards are local or have a `manifest.json`; otherwise, and in a mixture, whole shards are divided over the workers."""
    tokenizer: str
    """Hub name or folder of a `transformers` tokenizer."""
    num_workers: NonNegativeInt = 8
    """Worker processes per rank; 0 decodes in the training process."""
    shuffle_buffer: NonNegativeInt = 1000
    """Samples held for shuffling in each worker."""
    audio_dtype: Literal["float32", "int16"] = "int16"
    """How audio travels to the device: `int16`, as LAION-CLAP was trained, rounds samples by at most 1.5e-5; `float32`
    doesn't. Both clip them to ±1."""
    cache_gb: NonNegativeFloat = 50.0
    """GB (1e9 bytes) of disk per host for copies of remote shards, in `$XDG_CACHE_HOME/clap_ds/shards`."""

    @property
    def has_epochs(self) -> bool:
        """Whether every item comes once before any comes again, where it is known how many each shard has."""
        return not self.resampled and not (isinstance(self.shards, dict) and len(self.shards) > 1)


DATA_SOURCES: dict[str, type[Section]] = {"synthetic": SyntheticData, "webdataset": ShardData}

DataSettings = Annotated[SyntheticData | ShardData, Field(discriminator="source")]


class LossSettings(Section):
    """The contrastive loss over the global batch."""

    kind: Literal["softmax", "sigmoid"] = "softmax"
    """`softmax`: CLIP's and CLAP's symmetric cross entropy; `sigmoid`: SigLIP's pairwise loss, with a learned bias."""


class BenchSettings(Section):
    """The measuring protocol: warm-up steps are dropped, then `windows` windows of `steps_per_window` steps are timed."""

    warmup_steps: NonNegativeInt = 10
    """Steps before anything is timed."""
    windows: Annotated[int, Field(ge=2)] = 10
    """Timed windows; samples/s is all their samples over all their seconds."""
    steps_per_window: PositiveInt = 5
    """Steps timed together, between two synchronisations of the device."""
    breakdown_steps: NonNegativeInt = 5
    """Steps of the second, instrumented pass that says where the time goes; 0 leaves it out."""


class HardwareSettings(Section):
    """The peak that utilisation is a share of."""

    peak_tflops: PositiveFloat | None = None
    """Dense bf16 peak of one device; null: from this project's table, by the device's name."""


class OutputSettings(Section):
    """Where the run directory is made."""

    dir: str = "runs"
    """Folder of the run directories, relative to the checkout or, installed, to the working folder."""
    run_name: str | None = None
    """First part of the run directory's name; the configuration file's name when null."""


class DebugSettings(Section):
    """What helps to find out why a run hangs or dies; costs some speed and much log."""

    enabled: bool = False
    """Crashes leave Python stacks on the terminal and a core, NCCL says more, and no rank is ended for standing still.
    A collective may take 5 minutes, not half an hour."""


class TrainSettings(Section):
    """How long training goes on, what it starts from and what a batch is."""

    max_samples: PositiveInt | None = None
    """Audio–caption pairs to train on in all; give this or `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the data to train for; give this or `max_samples`. Mixtures and `resampled` data have no epochs."""
    pretrained: str | None = None
    """Start from these: a folder that `transformers.ClapModel` loads, a LAION-CLAP .pt file, or one of our checkpoints."""
    freeze: list[Tower] = []
    """Towers (with their projections) that are not trained, by `bench.py`, too."""
    lr_scale: dict[Tower, PositiveFloat] = {}
    """{"text": 0.1}: what a tower's learning rate is times the scheduler's. Its projection has the scheduler's own."""
    layer_decay: dict[Tower, Annotated[float, Field(gt=0, le=1)]] = {}
    """{"text": 0.75}: each block's learning rate is 0.75 of the next one's, the last block's 0.75 of the projection's.
    `lr_scale` comes on top."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights: 0.999 averages over about 1,000 steps. Evaluations,
    `weights.safetensors` and exports are then of the average."""
    accumulation: Literal["plain", "gradcache"] = "plain"
    """What a step's micro-batches are. `plain`: contrastive batches of their own, whose gradients are averaged (DeepSpeed's);
    `gradcache`: parts of one large batch with its exact gradient (GradCache, arXiv 2101.06983)."""
    resume: str = "auto"
    """`auto`: from the newest good checkpoint in `clap.checkpoint.folder` (or its `remote_sync`), if any; or a path."""
    target_metrics: dict[str, float] = {}
    """Stop as soon as an evaluation reaches all of these: {"zero_shot_top1": 0.9}. The time it took is recorded."""
    log_every_steps: PositiveInt = 10
    """Steps between lines of progress, and between checks that the loss is finite."""


class CheckpointSettings(Section):
    """When the state of training is saved, where to, and which of the saved states are kept."""

    folder: str | None = None
    """Null: `<output.dir>/<run_name>-<hash>-checkpoints`, with a hash of model, data, loss, seed and pretrained weights."""
    every_steps: PositiveInt | None = None
    """Optimiser steps from one checkpoint to the next; null: one at the end, and one when the run is stopped by a signal."""
    keep_last: PositiveInt = 3
    """The newest checkpoints, which are kept."""
    keep_best: NonNegativeInt = 1
    """Checkpoints kept beyond the last ones for being best by `best_metric`."""
    best_metric: str | None = None
    """Evaluation metric that tells the best; null: `zero_shot_top1` if it is evaluated, else `retrieval_audio_to_text_r1`."""
    async_save: bool = True
    """Write from a copy in the memory of rank 0's host while training goes on."""
    remote_sync: str | None = None
    """Folder or fsspec URL to which finished checkpoints are copied in the background, and from which `clap.train.resume` takes
    them when there is none here. Credentials come from the environment alone."""


class RetrievalSettings(Section):
    """Audio–text retrieval on held-out clips."""

    shards: str | list[str]
    """Tar files with `txt` or `json` captions; each caption of a clip counts."""


class ZeroShotSettings(Section):
    """Zero-shot classification of held-out clips by captions made of class names."""

    shards: str | list[str]
    """Tar files whose items carry a `json` member with their class."""
    class_key: str = "kind"
    """Member of that json: a class name, or a list of them (multi-label)."""
    templates: Annotated[list[Template], Field(min_length=1)] = ["{}", "the sound of {}", "a recording of {}"]
    """Captions with {} in the class name's place; a class is compared by the mean of its captions' embeddings."""
    classes: dict[str, Annotated[list[NotBlank], Field(min_length=1)]] | None = None
    """Class name → the names it has in captions; null: the classes found in the shards, with spaces for underscores."""


class EvaluationSettings(Section):
    """What is evaluated, while training and by `clap_ds/evaluate.py`."""

    every_steps: PositiveInt | None = None
    """Optimiser steps between evaluations while training; null: once, at the end."""
    retrieval: RetrievalSettings | None = None
    zero_shot: ZeroShotSettings | None = None
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer; null: that of `clap.data`."""
    batch_size: PositiveInt | None = None
    """Clips per rank and forward pass; null: as in training."""
    num_workers: NonNegativeInt = 0
    """Decoding processes per rank."""
