"""Define what the engine, evaluation and checkpoints need of an audio–text model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from clap_ds.config.model import ClapConfig
from clap_ds.model.packed import Packing
from clap_ds.model.precision import at_least_fp32


class ContrastiveModel(nn.Module):
    """An audio tower and a text tower with a shared embedding space: the base of `ClapModel` and
    `OpenClipModel`.

    A subclass assigns the attributes and implements `front_end`, and other methods as needed.

    Attributes:
        config: sizes. The loader reads waveforms of `audio.clip_shape`, and captions for `text`.
        audio, text: towers. Each is compiled with its backward pass.
        audio_projection, text_projection: heads. Each returns a tower's features: fp32 rows of
            length 1.
        logit_scale: log of the factor on cosine similarities, fp32, shape (1,).
        logit_bias: the sigmoid loss's bias, fp32, shape (1,); None for other losses.
        front_end_parts: names of submodules that `front_end` runs on waveforms, which are compiled,
            too.
    """

    config: ClapConfig
    audio: nn.Module
    text: nn.Module
    audio_projection: nn.Module
    text_projection: nn.Module
    logit_scale: nn.Parameter
    logit_bias: nn.Parameter | None
    front_end_parts: tuple[str, ...] = ()

    def front_end(self, audio: Tensor) -> Any:
        """Return the audio tower's input for a batch's audio. Raises ValueError if sizes aren't the
        model's."""
        raise NotImplementedError

    def text_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None
    ) -> tuple[Any, ...]:
        """Return the text tower's arguments for a batch's captions."""
        # Packed captions have no mask.
        return input_ids, attention_mask, packing

    def batch_norms(self) -> list[Any]:
        """Return the audio tower's modules with running statistics, which don't change if it is
        frozen."""
        # The base of `nn.BatchNorm1d`, `Fp32BatchNorm` and open_clip's.
        batch_norm = nn.modules.batchnorm._BatchNorm
        return [module for module in self.audio.modules() if isinstance(module, batch_norm)]

    def encode_audio(self, audio: Tensor) -> Tensor:
        """Embed a batch's audio as (batch, joint_dim), fp32 rows of length 1. Arguments are those
        of `front_end`."""
        return self.audio_projection(self.audio(self.front_end(audio)))

    def encode_text(
        self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None
    ) -> Tensor:
        """Embed captions as (batch, joint_dim), fp32 rows of length 1. Arguments are those of
        `text_inputs`."""
        inputs = self.text_inputs(input_ids, attention_mask, packing)
        return self.text_projection(self.text(*inputs))

    def forward(
        self,
        audio: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, ...]:
        """Return both embeddings, (batch, joint_dim), the logit scale (1,) and, if learned, the
        logit bias (1,), all fp32."""
        audio_features = self.encode_audio(audio)
        text_features = self.encode_text(input_ids, attention_mask, packing)
        # exp(logit_scale) is always positive: it is learned on a logarithmic scale.
        scale = self.logit_scale.float().exp()
        if self.logit_bias is None:
            return audio_features, text_features, scale
        return audio_features, text_features, scale, self.logit_bias.float()

    def running_statistics(self) -> list[Tensor]:
        """Return the buffers that change in training."""
        return [buffer for norm in self.batch_norms() for buffer in norm.buffers()]

    def fp32_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that `Module.to` keeps in fp32; an engine that casts `.data` must
        restore them."""
        # bf16's rounding errors would change all logits alike.
        parameters = [self.logit_scale]
        if self.logit_bias is not None:
            parameters.append(self.logit_bias)
        for norm in self.batch_norms():
            parameters.extend(norm.parameters())
        return parameters

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # `Module.to` calls this. The root module's own tensors are the logits' scales and bias.
        if recurse:
            for module in self.children():
                module._apply(fn)
        return super()._apply(at_least_fp32(fn), recurse=False)
