"""What a CLAP model is made of: the typed form of `presets/*.json`.

Sizes only. Nothing here imports torch, so that FLOPs and parameter counts can be worked out on a login node. How a tower runs
(dropout, SpecAugment, attention kernel) is a setting of the run and lives in `clap_ds.config.settings`.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from clap_ds.config.model_names import PRESET_DIR, preset_names, preset_of

PAD_TOKEN_ID = 1  # RoBERTa's
CHANNELS = 4
"""Spectrograms of a file for a model with feature fusion: the whole of it, and parts from its front, middle and back."""
NARROWING = 4
"""By how much the attention of feature fusion narrows its channels."""

PositiveInt = Annotated[int, Field(gt=0, le=2**24)]
NumLayers = Annotated[int, Field(gt=0, le=1000)]
"""Each is built, with or without numbers in it: somebody else's configuration mustn't ask for millions."""
Activation = Literal["relu", "gelu"]
Pooling = Literal["cls_pooler", "mean"]


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
    """LAION-CLAP's feature fusion, by which files longer than a clip are heard whole (`clap_ds.model.patch_embed`)."""

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
        if self.fusion and self.stage_grids[0] < 3:
            raise ValueError(f"fusion: tokens of three patches don't fit in a grid of {self.stage_grids[0]}")
        for stage, (dim, grid, heads) in enumerate(zip(self.stage_dims, self.stage_grids, self.num_heads, strict=True)):
            if dim % heads:
                raise ValueError(f"stage {stage}: {dim} channels don't divide into {heads} heads")
            if grid == 0 or grid % min(self.attention_window, grid):
                raise ValueError(f"stage {stage}: grid {grid} doesn't divide into windows of {self.attention_window}")
        return self


class TextConfig(Sizes):
    """RoBERTa. `hub_name` is the checkpoint these sizes belong to, for its tokenizer and pretrained weights."""

    hub_name: str
    vocab_size: PositiveInt
    max_positions: PositiveInt
    hidden_size: PositiveInt
    num_layers: NumLayers
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    layer_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """roberta-base's; `transformers.ClapModel` checkpoints carry 1e-12."""
    pooling: Pooling
    projection: ProjectionConfig

    @property
    def max_tokens(self) -> int:
        """Longest caption: RoBERTa numbers positions from the padding index + 1, so two are never used."""
        return self.max_positions - PAD_TOKEN_ID - 1


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
    """The model of `presets/<name>.json`, by any name that `preset_of` knows; raises KeyError where there is none."""
    name = preset_of(name)
    if name not in preset_names():
        raise KeyError(name)
    return ClapConfig.model_validate({"name": name, **json.loads((PRESET_DIR / f"{name}.json").read_text())})
