"""Train open_clip's audio–text models with this engine (`"preset": "open_clip:NAME"`).

Waveforms are of one length, as other models' here. open_clip's dropout, drop path and SpecAugment
are its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import ClapConfig
from clap_ds.config.open_clip_config import import_open_clip
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.mel import LogMel, full_scale
from clap_ds.model.packed import Packing

# Before open_clip, which imports transformers.
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401


class Normalize(nn.Module):
    """L2 normalization in fp32."""

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features.float(), dim=-1)


class OpenClipModel(ContrastiveModel):
    """A model that `open_clip.create_model` builds.

    Args:
        config: sizes that `clap_ds.config.open_clip_config` read.
        learns_bias: learn SigLIP's logit bias, initially -10, and start with its scale of 10.
        activation_checkpointing: towers (`audio`, `text`) whose blocks are recomputed in the
            backward pass.
        pretrained_text: initialize a text tower of `transformers` with its pretrained weights.
    """

    mel: LogMel | None

    def __init__(
        self,
        config: ClapConfig,
        *,
        learns_bias: bool = False,
        activation_checkpointing: Collection[str] = (),
        pretrained_text: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {}
        if learns_bias:
            options = {"init_logit_bias": -10.0, "init_logit_scale": math.log(10)}
        with import_open_clip(config.name) as open_clip:
            model = open_clip.create_model(
                config.open_clip,
                pretrained_text=pretrained_text,
                nonscalar_logit_scale=True,
                output_dict=False,
                **options,
            )
        self.config = config
        self.audio = model.audio
        self.text = model.text
        self.audio_projection = Normalize()
        self.text_projection = Normalize()
        self.logit_scale = model.logit_scale
        # None unless `learns_bias`.
        self.logit_bias = model.logit_bias
        for tower in activation_checkpointing:
            getattr(model, tower).set_grad_checkpointing()
        for parameter in self.parameters():
            # DeepSpeed requires it; HTSAT's mel filters are transposed.
            parameter.data = parameter.data.contiguous()
        self._sizes = model.audio.cfg
        if self._sizes.enable_fusion or self._sizes.training_head:
            raise ValueError(
                f"{config.name}: open_clip's feature fusion and training head are not supported"
            )
        self.mel = None
        if self._sizes.model_type == "naflexvit":
            # Its filters are HTK's, like those of feature fusion.
            self.mel = LogMel(config.audio.model_copy(update={"fusion": True}))
        # Runs the model once, on silence.
        self._freeze_unused()
        self.train()

    def _freeze_unused(self) -> None:
        """Stop training parameters that get no gradient, such as HTSAT's classifier: the all-reduce
        would wait for them."""
        waveforms = torch.zeros(1, self.config.audio.num_samples)
        # Not 0 or 1, which are padding.
        tokens = torch.full((1, self.config.text.max_tokens), 2)
        outputs = self.eval()(waveforms, tokens, None)
        sums = [output.sum() for output in outputs]
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(sums, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)

    def front_end(self, audio: Tensor) -> dict[str, Tensor]:
        """Return open_clip's batch of waveforms (batch, num_samples), int16 or of full scale ±1:
        for NaFlex, patches."""
        if audio.ndim != 2:
            raise ValueError(f"{self.config.name} takes waveforms, not log-mel features")
        if self.mel is None:
            # No clip is longer than the model's.
            longer = torch.zeros(len(audio), dtype=torch.bool, device=audio.device)
            return {"waveform": full_scale(audio), "longer": longer}
        from open_clip.audio.naflex_audio import mel_to_patches

        cfg = self._sizes
        clips = [
            mel_to_patches(mel, cfg.patch_freq, cfg.patch_time, cfg.in_chans, cfg.patch_pad_mode)
            for mel in self.mel(audio)
        ]
        # One dictionary with a leading batch dimension.
        return torch.utils.data.default_collate(clips)

    def text_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor]:
        """Return token ids alone; open_clip's towers recognize padding."""
        assert packing is None
        return (input_ids,)
