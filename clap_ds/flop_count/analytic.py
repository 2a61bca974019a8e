"""Forward cost and parameter counts of a CLAP model in closed form, from its sizes alone.

No model is built and torch is not imported: usable at once on a login node. Counts 2 FLOPs per multiply-add of every
matrix product and convolution; element-wise work, norms, softmax and the loss's logits are left out, as in the
published figures. The counters that look at a running model are in `flops_counters.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from clap_ds.config.model import AudioConfig, ClapConfig, ProjectionConfig, TextConfig

Convention = Literal["published", "model"]
CONVENTIONS: tuple[Convention, ...] = ("published", "model")
BACKWARD_OVER_FORWARD = 2
"""Every forward product has two in backward, for its input and for its weight."""


@dataclass(frozen=True)
class TextLengths:
    """How long captions are: what linears (the mean) and attention (the mean square) depend on."""

    mean: float
    mean_square: float

    @classmethod
    def fixed(cls, num_tokens: int) -> TextLengths:
        """Every caption takes `num_tokens`, as when captions are padded."""
        return cls(num_tokens, num_tokens**2)

    @classmethod
    def of(cls, lengths: Iterable[int]) -> TextLengths:
        """Captions that take only their own length, as when they are packed."""
        return cls.histogram(Counter(lengths))

    @classmethod
    def histogram(cls, weights: Mapping[int, float]) -> TextLengths:
        """The same from {tokens: weight}."""
        total = sum(weights.values())
        mean = sum(length * weight for length, weight in weights.items()) / total
        return cls(mean, sum(length**2 * weight for length, weight in weights.items()) / total)


def forward_flops(config: ClapConfig, lengths: TextLengths, convention: Convention) -> float:
    """FLOPs of one sample's forward pass."""
    return forward_components(config, lengths, convention)["forward"]


def recomputed_flops(config: ClapConfig, lengths: TextLengths, checkpointed: Collection[str]) -> float:
    """FLOPs of one sample's forward pass that the backward pass does again, with the blocks of these towers (`audio`,
    `text`) checkpointed."""
    parts = {"audio": ("block_linears", "window_attention"), "text": ("text_linears", "text_attention")}
    components = forward_components(config, lengths, "model")
    return sum(components[name] for tower in checkpointed for name in parts[tower])


def published_flops(config: ClapConfig) -> float:
    """FLOPs of one sample as the published table counts them, whatever a run's captions: all positions of the text
    tower's table (514), the STFT as a convolution, the AudioSet head. 111.20 (tiny) and 130.09 (base) GFLOPs."""
    return forward_flops(config, TextLengths.fixed(config.text.max_positions), "published")


def forward_components(config: ClapConfig, lengths: TextLengths, convention: Convention) -> dict[str, float]:
    """FLOPs of one sample's forward pass by component.

    Args:
        config: sizes.
        lengths: of the captions.
        convention: `published` counts the STFT as a convolution and the AudioSet head `tscam_conv`, and the stretch of
            the spectrogram as nothing; `model` counts what this engine executes: FFTs, the stretch as the matrix
            product it is, no AudioSet head, and in the last text layer only the tokens that are pooled.

    Returns:
        FLOPs by name, in the model's order. `block_linears`, `window_attention` and `patch_mergings` divide the sum of
        the `stage_…` rows another way; `audio_tower`, `text_tower` and `forward` are totals.
    """
    audio = _audio_components(config.audio, config.joint_dim, convention)
    text = _text_components(config.text, config.joint_dim, lengths, convention)
    views = {"block_linears", "window_attention", "patch_mergings"}
    audio_total = sum(flops for name, flops in audio.items() if name not in views)
    text_total = sum(text.values())
    return {
        **audio,
        "audio_tower": audio_total,
        **text,
        "text_tower": text_total,
        "forward": audio_total + text_total,
    }


def _audio_components(audio: AudioConfig, joint_dim: int, convention: Convention) -> dict[str, float]:
    num_bins = audio.stft_window // 2 + 1
    patches = audio.stage_grids[0] ** 2
    linears, attention, mergings = _stages(audio)
    front: dict[str, float] = {}
    if convention == "published":
        # torchlibrosa: one convolution for the real parts, one for the imaginary parts.
        front["stft_convolution"] = 2 * audio.num_frames * 2 * num_bins * audio.stft_window
    else:
        front["fft"] = fft_flops(audio.stft_window) * audio.num_frames
    front["mel"] = 2 * audio.num_frames * num_bins * audio.mel_bins
    if convention == "model":
        front["stretch"] = _stretch(audio)
    stages = {f"stage_{i}": sum(parts) for i, parts in enumerate(zip(linears, attention, mergings, strict=True))}
    return {
        **front,
        "patch_embedding": 2 * patches * audio.embed_dim * audio.patch_size**2,
        **stages,
        "block_linears": sum(linears),
        "window_attention": sum(attention),
        "patch_mergings": sum(mergings),
        **({"tscam_conv": _tscam_conv(audio)} if convention == "published" else {}),
        "audio_projection": _projection(audio.output_dim, audio.projection, joint_dim),
    }


def fft_flops(num_points: int) -> float:
    """One FFT of real input: half of the 5·N·log2(N) of a complex one (radix 2, Cooley and Tukey 1965; also the
    convention of FFTW's benchmarks)."""
    return 2.5 * num_points * math.log2(num_points)


def _stages(audio: AudioConfig) -> tuple[list[float], list[float], list[float]]:
    """Linears, attention products and patch merging of every stage."""
    linears, attention, mergings = [], [], []
    for stage, depth in enumerate(audio.depths):
        dim, grid = audio.stage_dims[stage], audio.stage_grids[stage]
        tokens, window_tokens = grid**2, min(audio.attention_window, grid) ** 2
        # Query, key, value and output: 4·C² a token; the MLP's two layers: 2·ratio·C².
        linears.append(2.0 * depth * tokens * (4 + 2 * audio.mlp_ratio) * dim**2)
        attention.append(2.0 * depth * tokens * 2 * window_tokens * dim)
        is_last = stage == audio.num_stages - 1
        mergings.append(0.0 if is_last else 2.0 * (tokens // 4) * (4 * dim) * (2 * dim))
    return linears, attention, mergings


def _stretch(audio: AudioConfig) -> float:
    """The bicubic stretch in time, which `htsat.FoldToImage` holds as a dense matrix."""
    width = audio.image_size * audio.freq_ratio
    return 2.0 * audio.mel_bins * audio.num_frames * width if audio.num_frames < width else 0.0


def _tscam_kernel_height(audio: AudioConfig) -> int:
    return max(1, audio.stage_grids[-1] // audio.freq_ratio)


def _tscam_conv(audio: AudioConfig) -> float:
    """HTSAT's AudioSet head: a convolution whose kernel spans the frequencies and three steps of time."""
    height, grid = _tscam_kernel_height(audio), audio.stage_grids[-1]
    num_steps = grid * (grid // height)
    return 2.0 * num_steps * audio.num_classes * audio.output_dim * height * 3


def _projection(input_dim: int, projection: ProjectionConfig, joint_dim: int) -> float:
    return 2.0 * projection.hidden_dim * (input_dim + joint_dim)


def _text_components(
    text: TextConfig, joint_dim: int, lengths: TextLengths, convention: Convention
) -> dict[str, float]:
    qkv = 3 * text.hidden_size**2
    rest = text.hidden_size**2 + 2 * text.hidden_size * text.intermediate_size
    linears = text.num_layers * lengths.mean * (qkv + rest)
    if convention == "model" and text.pooling == "cls_pooler":
        linears -= (lengths.mean - 1) * rest  # of the last layer, only the first token goes on
    return {
        "text_linears": 2.0 * linears,
        "text_attention": 2.0 * text.num_layers * 2 * lengths.mean_square * text.hidden_size,
        **({"text_pooler": 2.0 * text.hidden_size**2} if text.pooling == "cls_pooler" else {}),
        "text_projection": _projection(text.hidden_size, text.projection, joint_dim),
    }


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model.

    Attributes:
        audio: as open_clip counts its audio tower: with the frozen STFT and mel matrices and the AudioSet head.
        text: the text tower.
        total: both and the logit scale.
        trainable: what this engine trains.
    """

    audio: int
    text: int
    total: int
    trainable: int


def parameter_counts(config: ClapConfig) -> ParameterCounts:
    """Parameters in closed form, projections included."""
    audio = _audio_parameters(config.audio) + _projection_parameters(
        config.audio.output_dim, config.audio.projection, config.joint_dim
    )
    text = _text_parameters(config.text) + _projection_parameters(
        config.text.hidden_size, config.text.projection, config.joint_dim
    )
    unused = _untrained_audio_parameters(config.audio)
    return ParameterCounts(audio + unused, text, audio + unused + text + 1, audio + text + 1)


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _audio_parameters(audio: AudioConfig) -> int:
    total = 2 * audio.mel_bins  # batch norm
    total += _linear(audio.patch_size**2, audio.embed_dim) + 2 * audio.embed_dim
    for stage, (dim, depth, heads) in enumerate(zip(audio.stage_dims, audio.depths, audio.num_heads, strict=True)):
        window = min(audio.attention_window, audio.stage_grids[stage])
        hidden = audio.mlp_ratio * dim
        block = _linear(dim, 3 * dim) + _linear(dim, dim) + _linear(dim, hidden) + _linear(hidden, dim)
        total += depth * (block + 4 * dim + (2 * window - 1) ** 2 * heads)
        if stage < audio.num_stages - 1:
            total += 4 * dim * 2 * dim + 8 * dim
    return total + 2 * audio.output_dim


def _untrained_audio_parameters(audio: AudioConfig) -> int:
    """The STFT and mel matrices, frozen, and the AudioSet classifier, without a use for the contrastive loss."""
    num_bins = audio.stft_window // 2 + 1
    frozen = 2 * num_bins * audio.stft_window + num_bins * audio.mel_bins
    tscam_conv = _linear(audio.output_dim * _tscam_kernel_height(audio) * 3, audio.num_classes)
    return frozen + tscam_conv + _linear(audio.num_classes, audio.num_classes)


def _text_parameters(text: TextConfig) -> int:
    width = text.hidden_size
    embeddings = (text.vocab_size + text.max_positions + 1) * width + 2 * width
    layer = 4 * _linear(width, width) + _linear(width, text.intermediate_size) + _linear(text.intermediate_size, width)
    pooler = _linear(width, width) if text.pooling == "cls_pooler" else 0
    return embeddings + text.num_layers * (layer + 4 * width) + pooler


def _projection_parameters(input_dim: int, projection: ProjectionConfig, joint_dim: int) -> int:
    biases = projection.hidden_dim + joint_dim if projection.bias else 0
    return projection.hidden_dim * (input_dim + joint_dim) + biases
