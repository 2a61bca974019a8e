"""What a CLAP model is made of: the typed form of `presets/*.json`, and of what a path to sizes names.

Nothing here imports torch, so that FLOPs and parameter counts can be worked out on a login node.
"""

from __future__ import annotations

import argparse
import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from clap_ds.config.clap_json import read_clap
from clap_ds.config.errors import did_you_mean
from clap_ds.config.files import object_in
from clap_ds.config.model_names import PRESET_DIR, preset_names, preset_of

PAD_TOKEN_ID = 1  # RoBERTa's
CONTEXT_LENGTH = 77
"""Most tokens of a caption where nothing says how long those of training were: LAION's."""
CHANNELS = 4
"""Spectrograms of a file for a model with feature fusion: the whole of it, and parts from its front, middle and back."""
NARROWING = 4
"""By how much the attention of feature fusion narrows its channels."""

PositiveInt = Annotated[int, Field(gt=0, le=2**24)]
NumLayers = Annotated[int, Field(gt=0, le=1000)]
"""Each is built, with or without numbers in it: somebody else's configuration mustn't ask for millions."""
Activation = Literal["relu", "gelu"]


PRESETS = f"{', '.join(preset_names())}; or the path of a preset's JSON, of a ClapModel's folder or config.json"
"""What `load_preset` takes, for messages."""


class Sizes(BaseModel):
    """Base of every preset section: unknown fields are refused and values don't change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ProjectionConfig(Sizes):
    """Two-layer head from a tower's width to the joint space: linear, activation, linear."""

    hidden_dim: PositiveInt
    activation: Activation
    bias: bool


class AudioConfig(Sizes):
    """HTSAT: a Swin transformer over a log-mel spectrogram folded into a square image (arXiv 2202.00874)."""

    sample_rate: PositiveInt
    num_samples: PositiveInt
    stft_window: PositiveInt
    hop_size: PositiveInt
    mel_bins: PositiveInt
    fmin: Annotated[float, Field(ge=0)]
    fmax: PositiveInt
    image_size: PositiveInt
    patch_size: PositiveInt
    embed_dim: PositiveInt
    depths: Annotated[list[NumLayers], Field(max_length=16)]
    num_heads: list[PositiveInt]
    attention_window: PositiveInt
    mlp_ratio: PositiveInt
    num_classes: PositiveInt
    projection: ProjectionConfig
    fusion: bool = False
    """LAION-CLAP's feature fusion, by which files longer than a clip are heard whole."""

    @property
    def num_frames(self) -> int:
        """STFT frames of one clip (centred frames, so one more than the hops that fit)."""
        return self.num_samples // self.hop_size + 1

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Of one clip's log-mel features."""
        return self.num_frames, self.mel_bins

    @property
    def clip_shape(self) -> tuple[int, ...]:
        """Of one clip as audio files are read for this model: a waveform or, with fusion, log-mel features."""
        return (CHANNELS, *self.feature_shape) if self.fusion else (self.num_samples,)

    @property
    def num_stages(self) -> int:
        return len(self.depths)

    @property
    def stage_dims(self) -> list[int]:
        """Channels in each stage; patch merging doubles them."""
        return [self.embed_dim * 2**stage for stage in range(self.num_stages)]

    @property
    def stage_grids(self) -> list[int]:
        """Side of the square token grid in each stage; patch merging halves it."""
        return [self.image_size // self.patch_size // 2**stage for stage in range(self.num_stages)]

    @property
    def freq_ratio(self) -> int:
        """How many time segments are stacked along frequency to make the image square."""
        return self.image_size // self.mel_bins

    @property
    def output_dim(self) -> int:
        return self.stage_dims[-1]

    @model_validator(mode="after")
    def _check_geometry(self) -> AudioConfig:
        if len(self.depths) != len(self.num_heads):
            raise ValueError(f"depths has {len(self.depths)} stages, num_heads has {len(self.num_heads)}")
        if self.image_size % self.mel_bins:
            raise ValueError(f"image_size {self.image_size} is not a multiple of mel_bins {self.mel_bins}")
        if self.num_frames > self.image_size * self.freq_ratio:
            raise ValueError(f"{self.num_frames} frames don't fit in an image of {self.image_size}×{self.freq_ratio}")
        for stage, (dim, grid, heads) in enumerate(zip(self.stage_dims, self.stage_grids, self.num_heads, strict=True)):
            if dim % heads:
                raise ValueError(f"stage {stage}: {dim} channels don't divide into {heads} heads")
            if grid == 0 or grid % min(self.attention_window, grid):
                raise ValueError(f"stage {stage}: grid {grid} doesn't divide into windows of {self.attention_window}")
        return self


class TextConfig(Sizes):
    """One of `transformers`' encoders. `hub_name` is the checkpoint of its tokenizer and pretrained weights."""

    architecture: Literal["roberta", "bert"] = "roberta"
    """What `transformers` calls it; DistilRoBERTa is a `roberta` of 6 layers."""
    hub_name: str
    vocab_size: PositiveInt
    max_positions: PositiveInt
    hidden_size: PositiveInt
    num_layers: NumLayers
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    layer_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """roberta-base's; `transformers.ClapModel` checkpoints carry 1e-12."""
    pooling: Literal["cls_pooler", "mean"]
    projection: ProjectionConfig

    @property
    def pad_token_id(self) -> int:
        return 0 if self.architecture == "bert" else PAD_TOKEN_ID

    @property
    def first_position(self) -> int:
        """Row of the position table that a caption's first token takes: RoBERTa leaves two unused."""
        return 0 if self.architecture == "bert" else PAD_TOKEN_ID + 1

    @property
    def max_tokens(self) -> int:
        """Longest caption."""
        return self.max_positions - self.first_position

    @property
    def ends_with_first_token(self) -> bool:
        """Whether the last layer computes each caption's first token alone past its keys and values."""
        return self.pooling == "cls_pooler"

    @model_validator(mode="after")
    def _check_sizes(self) -> TextConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} doesn't divide into num_heads {self.num_heads}")
        if self.max_tokens < 2:
            raise ValueError(f"max_positions {self.max_positions} leaves positions for {self.max_tokens} tokens")
        return self


class ClapConfig(Sizes):
    """A whole CLAP model: both towers and the joint embedding they project to."""

    name: str
    audio: AudioConfig
    text: TextConfig
    joint_dim: PositiveInt

    @cached_property
    def title(self) -> str:
        return self.name.replace("_", "-")


def load_preset(name: str) -> ClapConfig:
    """Load the sizes of what `PRESETS` tells. Raises ValueError, in a line, for anything else."""
    names, known = preset_names(), preset_of(name)
    if known in names:
        return parse_sizes(object_in(PRESET_DIR / f"{known}.json"), known)
    path = Path(os.path.abspath(name))
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"no preset {name!r}{did_you_mean(name, names, most_listed=0)}; there are {PRESETS}")
    content = object_in(path)
    if "model_type" in content:
        return parse_sizes(read_clap(path, content), path.parent.name, str(path))
    return parse_sizes(content, path.stem, str(path))


def parse_sizes(content: dict[str, Any], name: str, where: str = "") -> ClapConfig:
    """A preset's content, which may have a name of its own; raises ValueError, in a line, with `where` and what is wrong."""
    try:
        return ClapConfig.model_validate({"name": name, **content})
    except ValidationError as error:
        problems = "; ".join(map(_explain, error.errors()))
        raise ValueError(f"{where}: {problems}" if where else problems) from None


def _explain(details: Any) -> str:
    """A field, what was expected of it, and the nearest name of one that there isn't."""
    field = ".".join(map(str, details["loc"]))
    if details["type"] != "extra_forbidden":
        message = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        return f"{field}: {message}".removeprefix(": ")
    names = {name for sizes in (ClapConfig, AudioConfig, TextConfig, ProjectionConfig) for name in sizes.model_fields}
    return f"{field}: no such field{did_you_mean(details['loc'][-1], names)}"


def preset_argument(text: str) -> str:
    """For `type=` of argparse: what `load_preset` takes."""
    try:
        load_preset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
