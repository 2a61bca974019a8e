"""Reference CLAP models from HF `transformers`, with the published sizes and without this project's
configurations."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401

import transformers  # isort: skip

MICRO_TEXT = {
    "vocab_size": 512,
    "max_position_embeddings": 66,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
MICRO_AUDIO = {
    "patch_embeds_hidden_size": 16,
    "depths": [2, 1],
    "num_attention_heads": [2, 4],
    "hidden_size": 32,
    "num_mel_bins": 16,
    "spec_size": 64,
    "num_classes": 7,
}


class HfClap(nn.Module):
    """`transformers.ClapModel` as LAION's tiny model or the micro one."""

    def __init__(self, *, audio: dict, text: dict, joint_dim: int) -> None:
        super().__init__()
        text = {**text, "layer_norm_eps": 1e-5}
        config = transformers.ClapConfig(
            audio_config=audio, text_config=text, projection_dim=joint_dim
        )
        self.clap = transformers.ClapModel(config)
        self.eval()

    def encode_audio(self, features: Tensor) -> Tensor:
        return self.clap.get_audio_features(input_features=features).pooler_output

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.clap.get_text_features(
            input_ids=input_ids, attention_mask=attention_mask
        ).pooler_output

    def named(self) -> dict[str, Tensor]:
        return self.clap.state_dict(keep_vars=True)


def randomise(tensors: dict[str, Tensor], seed: int) -> None:
    """Draw every weight and statistic, large enough that omitting any of them changes the
    result."""
    generator = torch.Generator().manual_seed(seed)
    # Slices of one pool, as drawing all of a full-size model takes seconds.
    pool = torch.randn(2**22, generator=generator)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        start = int(torch.randint(len(pool), (1,), generator=generator))
        repeats = -(-(start + tensor.numel()) // len(pool))
        noise = pool.repeat(repeats)[start : start + tensor.numel()].view(tensor.shape)
        if name.endswith("running_mean"):
            value = -30 + 10 * noise
        elif name.endswith("running_var"):
            value = 200 * noise.abs() + 50
        elif "logit_scale" in name:
            value = 2 + 0.5 * noise
        elif "relative_position_bias_table" in name:
            value = noise
        elif tensor.ndim > 1:
            value = noise / math.sqrt(tensor[0].numel())
            if name.startswith("text_model.encoder") and ".attention.output." in name:
                # Otherwise attention makes tokens alike and its gradients rounding noise.
                value *= 0.2
        elif name.endswith("weight"):
            value = 1 + 0.2 * noise
        else:
            value = 0.2 * noise
        tensor.data.copy_(value)


@contextmanager
def no_initialisation() -> Iterator[None]:
    """Skip PyTorch's random initialization of layers that are overwritten later: seconds for a
    full-size model."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("normal_", "kaiming_uniform_", "trunc_normal_"):
            patch.setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield


def clips(num_clips: int, num_samples: int, seed: int) -> Tensor:
    """Return (num_clips, num_samples): noise at several levels plus a tone; half of the last clip
    is silent."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.logspace(-3, -0.5, num_clips)[:, None]
    time = torch.arange(num_samples) / 48000
    waveforms = levels * torch.randn(num_clips, num_samples, generator=generator)
    waveforms += 0.1 * torch.sin(2 * math.pi * (300 + 200 * seed) * time)
    waveforms[-1, num_samples // 2 :] = 0
    return waveforms.clamp(-1, 1)


def captions(
    num_captions: int, num_tokens: int, vocab_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return token ids and mask, each (num_captions, num_tokens), of captions of different lengths
    padded with id 1."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, vocab_size, (num_captions, num_tokens), generator=generator)
    lengths = torch.linspace(num_tokens, num_tokens // 3, num_captions).long()
    mask = (torch.arange(num_tokens) < lengths[:, None]).long()
    return input_ids.where(mask.bool(), torch.tensor(1)), mask
