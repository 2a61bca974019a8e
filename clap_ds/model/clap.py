"""Define the CLAP model: audio and text towers projected to a joint space (arXiv 2211.06687).

The root module only connects submodules, so that profilers that hook submodules count all work.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import CHANNELS, ClapConfig, ProjectionConfig
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.htsat import HTSAT
from clap_ds.model.mel import LogMel
from clap_ds.model.open_clip_model import OpenClipModel
from clap_ds.model.text import TextTower

INITIAL_LOGIT_SCALE = math.log(1 / 0.07)


class Projection(nn.Module):
    """A two-layer head to the joint space, then L2 normalization in fp32."""

    def __init__(self, input_dim: int, output_dim: int, config: ProjectionConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(input_dim, config.hidden_dim, bias=config.bias)
        self.activation = nn.ReLU() if config.activation == "relu" else nn.GELU()
        self.linear2 = nn.Linear(config.hidden_dim, output_dim, bias=config.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        """Project (batch, input_dim) to (batch, output_dim), fp32 rows of length 1."""
        # (batch, hidden_dim)
        hidden = self.activation(self.linear1(pooled))
        # In fp32, because the loss multiplies cosines by up to 100.
        return F.normalize(self.linear2(hidden).float(), dim=-1)


class ClapModel(ContrastiveModel):
    """A contrastive language–audio model.

    Args:
        config: sizes; `clap_ds.config.model.load_preset` returns the published ones.
        drop_path: stochastic depth of the last audio block.
        attention: kernel of the audio tower's window attention (`clap_ds.model.window_attention`).
        mlp: kernel of both towers' MLPs; `triton` fuses the audio tower's supported widths
            (`clap_ds.model.mlp_triton`).
        text_attention: kernel of the text tower's attention (`clap_ds.model.text_attention`),
            `torch` or `triton`.
        activation_checkpointing: towers (`audio`, `text`) whose blocks are recomputed in the
            backward pass.
        learns_bias: learn SigLIP's logit bias, initially -10, and start with its scale of 10 (arXiv
            2303.15343).

    `logit_scale` is the audio one in checkpoints with two scales. The text one, `logit_scale_text`,
    is loaded and saved, but unused.
    """

    audio: HTSAT
    text: TextTower
    logit_scale_text: Tensor
    front_end_parts = ("mel",)

    def __init__(
        self,
        config: ClapConfig,
        *,
        drop_path: float = 0.1,
        text_dropout: float = 0.1,
        spec_augment: bool = True,
        learns_bias: bool = False,
        attention: str = "sdpa",
        mlp: str = "torch",
        text_attention: str = "torch",
        activation_checkpointing: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.mel = LogMel(config.audio)
        self.audio = HTSAT(
            config.audio,
            drop_path=drop_path,
            spec_augment=spec_augment,
            checkpoint="audio" in activation_checkpointing,
        )
        self.audio.use_kernels(attention, mlp)
        self.audio_projection = Projection(
            config.audio.output_dim, config.joint_dim, config.audio.projection
        )
        self.text = TextTower(
            config.text,
            dropout=text_dropout,
            checkpoint="text" in activation_checkpointing,
        )
        self.text.use_kernels(text_attention, mlp)
        self.text_projection = Projection(
            config.text.hidden_size, config.joint_dim, config.text.projection
        )
        # One-dimensional, because DeepSpeed can't broadcast a scalar parameter.
        initial_scale = math.log(10) if learns_bias else INITIAL_LOGIT_SCALE
        self.logit_scale = nn.Parameter(torch.tensor([initial_scale]))
        # SigLIP: most pairs are negative, so all start as such.
        self.logit_bias = nn.Parameter(torch.tensor([-10.0])) if learns_bias else None
        # Not a parameter, because it gets no gradient.
        self.register_buffer("logit_scale_text", torch.tensor([INITIAL_LOGIT_SCALE]))

    def front_end(self, audio: Tensor) -> Tensor:
        """Return log-mel features for the audio tower. Raises ValueError if sizes aren't the
        model's.

        Accepts waveforms (batch, num_samples) at the preset's sample rate, int16 or of full scale
        ±1, or the output of `mel`, (batch, num_frames, mel_bins). With feature fusion also
        (batch, 4, num_frames, mel_bins), see `patch_embed.py`."""
        sizes = self.config.audio
        # Features come from shards that store log-mel spectrograms.
        features = audio if audio.ndim > 2 else self.mel(audio)
        if sizes.fusion and features.ndim == 3:
            # A file that is no longer than a clip: its four channels are equal.
            features = features[:, None].expand(-1, CHANNELS, -1, -1)
        shape = sizes.clip_shape if sizes.fusion else sizes.feature_shape
        if features.shape[1:] != shape:
            frames, bins = sizes.feature_shape
            channels = f"{CHANNELS}, " if sizes.fusion and audio.ndim > 3 else ""
            expected = f"(batch, {channels}{frames} frames, {bins} mel bins)"
            raise ValueError(f"features are {tuple(audio.shape)}, expected {expected}")
        return features


def new_model(config: ClapConfig, **options: Any) -> ContrastiveModel:
    """Build a new `ClapModel`, or the model of open_clip that `config` names. Raises ValueError if
    that isn't possible."""
    model_class = OpenClipModel if config.open_clip else ClapModel
    return model_class(config, **options)
