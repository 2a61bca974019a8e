"""Define the CLAP model: audio and text towers projected to a joint space (arXiv 2211.06687).

The root module only connects submodules, so that profilers that hook submodules count all work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import CHANNELS, ClapConfig, ProjectionConfig
from clap_ds.model.htsat import HTSAT
from clap_ds.model.mel import LogMel
from clap_ds.model.packed import Packing
from clap_ds.model.precision import at_least_fp32
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
        return F.normalize(self.linear2(self.activation(self.linear1(pooled))).float(), dim=-1)


class ClapModel(nn.Module):
    """A contrastive language–audio model.

    Args:
        config: sizes; `clap_ds.config.model.load_preset` returns the published ones.
        drop_path: stochastic depth of the last audio block.
        attention: kernel of the audio tower's window attention (`clap_ds.model.window_attention`).
        mlp: kernel of the audio blocks' MLPs; `triton` fuses supported widths (`clap_ds.model.mlp_triton.supports`).
        activation_checkpointing: towers (`audio`, `text`) whose blocks are recomputed in the backward pass.
        learns_bias: learn SigLIP's logit bias, initially -10, and start with its scale of 10 (arXiv 2303.15343).

    Attributes:
        logit_scale: log of the factor on cosine similarities, fp32, shape (1,). In checkpoints with two scales, the audio one.
        logit_scale_text: the text one; loaded and saved, but unused.
    """

    logit_scale_text: Tensor

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
        activation_checkpointing: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.mel = LogMel(config.audio)
        own = {tower: tower in activation_checkpointing for tower in ("audio", "text")}
        self.audio = HTSAT(config.audio, drop_path=drop_path, spec_augment=spec_augment, checkpoint=own["audio"])
        self.audio.use_kernels(attention, mlp)
        self.audio_projection = Projection(config.audio.output_dim, config.joint_dim, config.audio.projection)
        self.text = TextTower(config.text, dropout=text_dropout, checkpoint=own["text"])
        self.text_projection = Projection(config.text.hidden_size, config.joint_dim, config.text.projection)
        self.logit_scale = nn.Parameter(torch.tensor([math.log(10) if learns_bias else INITIAL_LOGIT_SCALE]))
        self.logit_bias = nn.Parameter(torch.tensor([-10.0])) if learns_bias else None
        self.register_buffer("logit_scale_text", torch.tensor([INITIAL_LOGIT_SCALE]))

    def encode_audio(self, audio: Tensor) -> Tensor:
        """Embed audio as (batch, joint_dim), fp32 rows of length 1. Raises ValueError if sizes aren't the model's.

        Accepts waveforms (batch, num_samples) at the preset's sample rate, int16 or of full scale ±1, or the output of `mel`,
        (batch, num_frames, mel_bins). With feature fusion also (batch, 4, num_frames, mel_bins), see `patch_embed.py`."""
        sizes = self.config.audio
        frames, bins = sizes.feature_shape
        features = audio if audio.ndim > 2 else self.mel(audio)
        if sizes.fusion and features.ndim == 3:
            features = features[:, None].expand(-1, CHANNELS, -1, -1)
        if features.shape[1:] != (sizes.clip_shape if sizes.fusion else sizes.feature_shape):
            channels = f"{CHANNELS}, " if sizes.fusion and audio.ndim > 3 else ""
            expected = f"(batch, {channels}{frames} frames, {bins} mel bins)"
            raise ValueError(f"features are {tuple(audio.shape)}, expected {expected}")
        return self.audio_projection(self.audio(features))

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None) -> Tensor:
        """Embed captions as (batch, joint_dim), fp32 rows of length 1. Arguments are those of `TextTower.forward`."""
        return self.text_projection(self.text(input_ids, attention_mask, packing))

    def forward(
        self, audio: Tensor, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, ...]:
        """Return both embeddings, (batch, joint_dim), the logit scale (1,) and, if learned, the logit bias (1,), all fp32."""
        features = self.encode_audio(audio), self.encode_text(input_ids, attention_mask, packing)
        bias = () if self.logit_bias is None else (self.logit_bias.float(),)
        return *features, self.logit_scale.float().exp(), *bias

    def fp32_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that `Module.to` keeps in fp32; an engine that casts `.data` must restore them."""
        bias = [] if self.logit_bias is None else [self.logit_bias]
        return [self.logit_scale, *bias, *(each for norm in self.audio.batch_norms() for each in norm.parameters())]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        keep = at_least_fp32(fn)
        own = {id(self.logit_scale), id(self.logit_scale_text), id(self.logit_bias)}
        return super()._apply(lambda tensor: keep(tensor) if id(tensor) in own else fn(tensor), recurse)
