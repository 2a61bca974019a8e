"""Train open_clip's audio–text models with this engine (`"preset": "open_clip:NAME"`).

Waveforms are of one length, as other models' here. open_clip's dropout, drop path and SpecAugment
are its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import ClapConfig
from clap_ds.config.open_clip_config import open_clip_for
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.mel import LogMel, full_scale
from clap_ds.model.packed import Packing
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before open_clip, which imports transformers)


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
        initial = (
            {"init_logit_bias": -10.0, "init_logit_scale": torch.tensor(10.0).log().item()}
            if learns_bias
            else {}
        )
        options = {
            "pretrained_text": pretrained_text,
            "nonscalar_logit_scale": True,
            "output_dict": False,
            **initial,
        }
        with open_clip_for(config.name) as open_clip:
            theirs = open_clip.create_model(config.open_clip, **options)
        self.config = config
        self.audio = theirs.audio
        self.text = theirs.text
        self.audio_projection = Normalize()
        self.text_projection = Normalize()
        self.logit_scale = theirs.logit_scale
        self.logit_bias = theirs.logit_bias
        for tower in activation_checkpointing:
            getattr(theirs, tower).set_grad_checkpointing()
        for parameter in self.parameters():
            parameter.data = (
                parameter.data.contiguous()
            )  # DeepSpeed requires it; HTSAT's mel filters are transposed
        self._sizes = theirs.audio.cfg
        if self._sizes.enable_fusion or self._sizes.training_head:
            raise ValueError(
                f"{config.name}: open_clip's feature fusion and training head are not supported"
            )
        is_naflex = (
            self._sizes.model_type == "naflexvit"
        )  # its filters are HTK's, like those of feature fusion
        self.mel = LogMel(config.audio.model_copy(update={"fusion": True})) if is_naflex else None
        self._freeze_unused()
        self.train()

    def _freeze_unused(self) -> None:
        """Stop training parameters that get no gradient, such as HTSAT's classifier: the all-reduce
        would wait for them."""
        tokens = torch.full((1, self.config.text.max_tokens), 2)  # 0 and 1 are padding
        outputs = self.eval()(torch.zeros(1, self.config.audio.num_samples), tokens, None)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(
            [each.sum() for each in outputs], trained, allow_unused=True
        )
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)

    def front_end(self, audio: Tensor) -> dict[str, Tensor]:
        """Return open_clip's batch of waveforms (batch, num_samples), int16 or of full scale ±1:
        for NaFlex, patches."""
        if audio.ndim != 2:
            raise ValueError(f"{self.config.name} takes waveforms, not log-mel features")
        if self.mel is None:
            return {
                "waveform": full_scale(audio),
                "longer": torch.zeros(len(audio), dtype=torch.bool, device=audio.device),
            }
        from open_clip.audio.naflex_audio import mel_to_patches

        sizes = (
            self._sizes.patch_freq,
            self._sizes.patch_time,
            self._sizes.in_chans,
            self._sizes.patch_pad_mode,
        )
        patches = [mel_to_patches(each, *sizes) for each in self.mel(audio)]
        return {name: torch.stack([each[name] for each in patches]) for name in patches[0]}

    def text_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor]:
        """Return token ids alone; open_clip's towers recognize padding."""
        assert packing is None
        return (input_ids,)
