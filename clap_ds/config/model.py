"""Typed sizes of a CLAP model, from `presets/*.json` or a path. Imports no torch, so it works on
login nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from clap_ds.config.model_names import PRESET_DIR, find_preset, list_presets
from clap_ds.config.open_clip_config import PREFIX, convert_open_clip_config
from clap_ds.config.transformers_config import read_clap_config
from clap_ds.utils.errors import did_you_mean, explain
from clap_ds.utils.files import read_object

# RoBERTa's
PAD_TOKEN_ID = 1
# `transformers`' model types that differ from RoBERTa's in sizes and vocabulary only
LIKE_ROBERTA = ("xlm-roberta", "camembert")
# LAION's, if the training length is unknown
CONTEXT_LENGTH = 77
# spectrograms per file with feature fusion: all of it, and crops from its front, middle and back
CHANNELS = 4
# int16 value of full scale, as in libsndfile: 16-bit audio passes unchanged
INT16_SCALE = 32768
# channel reduction factor of feature fusion's attention
NARROWING = 4

PositiveInt = Annotated[int, Field(gt=0, le=2**24)]
# up to which every whole number is a float
MOST = 2**53
# a number of things, bytes or milliseconds in a file of others
Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
# Each layer is built, so an untrusted configuration must not request millions.
NumLayers = Annotated[int, Field(gt=0, le=1000)]
Activation = Literal["relu", "gelu"]


# values that `load_preset` accepts, for messages
PRESETS = (
    f"{', '.join(list_presets())}; open_clip:NAME; or the path of a preset's JSON,"
    " of a ClapModel's folder or config.json"
)


class Section(BaseModel):
    """Base of sections of presets and of `clap`: unknown fields and wrong types are rejected."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ProjectionConfig(Section):
    """Two-layer head from a tower's width to the joint space: linear, activation, linear."""

    hidden_dim: PositiveInt
    activation: Activation
    bias: bool


class AudioConfig(Section):
    """HTSAT: a Swin transformer over a log-mel spectrogram folded into a square image (arXiv
    2202.00874)."""

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
    """LAION-CLAP's feature fusion, which processes files longer than a clip whole."""

    @property
    def num_frames(self) -> int:
        """STFT frames per clip (centered, so one more than the hops that fit)."""
        return self.num_samples // self.hop_size + 1

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Shape of a clip's log-mel features: (frames, mel bins)."""
        return self.num_frames, self.mel_bins

    @property
    def clip_shape(self) -> tuple[int, ...]:
        """Shape of a clip as read from audio files: a waveform or, with fusion, log-mel
        features."""
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
        """Number of time segments stacked along frequency to make the image square."""
        return self.image_size // self.mel_bins

    @property
    def output_dim(self) -> int:
        return self.stage_dims[-1]

    @model_validator(mode="after")
    def _check_geometry(self) -> AudioConfig:
        num_stages = self.num_stages
        image_size = self.image_size
        window = self.attention_window
        if num_stages != len(self.num_heads):
            raise ValueError(f"depths has {num_stages} stages, num_heads has {len(self.num_heads)}")
        if image_size % self.mel_bins:
            raise ValueError(
                f"image_size {image_size} is not a multiple of mel_bins {self.mel_bins}"
            )
        if self.num_frames > image_size * self.freq_ratio:
            image = f"{image_size}×{self.freq_ratio}"
            raise ValueError(f"{self.num_frames} frames don't fit in an image of {image}")
        for stage, num_heads in enumerate(self.num_heads):
            channels = self.stage_dims[stage]
            grid = self.stage_grids[stage]
            if channels % num_heads:
                raise ValueError(
                    f"stage {stage}: {channels} channels don't divide into {num_heads} heads"
                )
            # A grid that is smaller than a window is one window.
            if grid == 0 or grid % min(window, grid):
                raise ValueError(
                    f"stage {stage}: grid {grid} doesn't divide into windows of {window}"
                )
        return self


class TextConfig(Section):
    """A `transformers` text encoder. `hub_name` is the checkpoint of its tokenizer and pretrained
    weights."""

    architecture: Literal["roberta", "bert"] = "roberta"
    """`transformers`' name. `roberta` includes XLM-RoBERTa, CamemBERT and DistilRoBERTa."""
    hub_name: str
    caption_prefix: str = ""
    """Text that the encoder expects before each caption, such as E5's `query: `."""
    vocab_size: PositiveInt
    pad_token_id: Annotated[int, Field(ge=0)] = PAD_TOKEN_ID
    """The tokenizer's; by default 0 for `bert`."""
    max_positions: PositiveInt
    hidden_size: PositiveInt
    num_layers: NumLayers
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    layer_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Default of roberta-base; `transformers.ClapModel` checkpoints have 1e-12."""
    pooling: Literal["cls_pooler", "mean"]
    projection: ProjectionConfig

    @property
    def first_position(self) -> int:
        """Position index of a caption's first token: RoBERTa leaves two unused."""
        return 0 if self.architecture == "bert" else self.pad_token_id + 1

    @property
    def max_tokens(self) -> int:
        """Maximum tokens per caption."""
        return self.max_positions - self.first_position

    @property
    def ends_with_first_token(self) -> bool:
        """Whether the last layer computes only the first token, except for keys and values."""
        return self.pooling == "cls_pooler"

    @model_validator(mode="before")
    @classmethod
    def _read_architecture(cls, sizes: Any) -> Any:
        """Replace `transformers`' other names of RoBERTa, and set BERT's padding."""
        architecture = sizes.get("architecture") if isinstance(sizes, dict) else None
        if architecture in LIKE_ROBERTA:
            return {**sizes, "architecture": "roberta"}
        if architecture == "bert":
            return {"pad_token_id": 0, **sizes}
        return sizes

    @model_validator(mode="after")
    def _check_sizes(self) -> TextConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} doesn't divide into num_heads {self.num_heads}"
            )
        if self.max_tokens < 2:
            tokens = f"only {self.max_tokens} tokens, expected 2"
            raise ValueError(f"max_positions {self.max_positions} leaves {tokens}")
        if self.pad_token_id >= self.vocab_size:
            limit = f"not below vocab_size {self.vocab_size}"
            raise ValueError(f"pad_token_id {self.pad_token_id} is {limit}")
        # Other ids would shift the positions.
        if self.architecture == "roberta" and self.pad_token_id != PAD_TOKEN_ID:
            raise ValueError(f"pad_token_id {self.pad_token_id}: RoBERTa's is {PAD_TOKEN_ID}")
        return self


class ClapConfig(Section):
    """A CLAP model: both towers and their joint embedding."""

    name: str
    audio: AudioConfig
    text: TextConfig
    joint_dim: PositiveInt

    @property
    def open_clip(self) -> str:
        """Name of open_clip's model; empty for this project's."""
        return self.name.removeprefix(PREFIX) if self.name.startswith(PREFIX) else ""


def load_preset(name: str) -> ClapConfig:
    """Load the sizes named by one of `PRESETS`. Raises ValueError with one line."""
    if name.startswith(PREFIX):
        try:
            sizes = convert_open_clip_config(name.removeprefix(PREFIX))
        # fields of wrong types
        except (AttributeError, LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{name}: its configuration can't be read: {error!r}") from error
        return parse_sizes(sizes, name, name)
    presets = list_presets()
    preset = find_preset(name)
    if preset in presets:
        return parse_sizes(read_object(PRESET_DIR / f"{preset}.json"), preset)
    path = Path(os.path.abspath(name))
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        hint = did_you_mean(name, presets, most_listed=0)
        raise ValueError(f"no preset {name!r}{hint}; expected one of {PRESETS}")
    content = read_object(path)
    if "model_type" in content:
        return parse_sizes(read_clap_config(path, content), path.parent.name, str(path))
    return parse_sizes(content, path.stem, str(path))


def parse_sizes(content: dict[str, Any], name: str, where: str = "") -> ClapConfig:
    """Validate a preset's content, which may override `name`. Raises ValueError with one line that
    starts with `where`."""
    try:
        return ClapConfig.model_validate({"name": name, **content})
    except ValidationError as error:
        problems = "; ".join(explain(details, ClapConfig) for details in error.errors())
        raise ValueError(f"{where}: {problems}" if where else problems) from None
