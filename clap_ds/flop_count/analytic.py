"""Compute the FLOPs of a CLAP model in closed form from its sizes. Imports no torch.

Counts 2 FLOPs per multiply-add of every matrix product and convolution. Omits element-wise
operations, norms, softmax and the loss's logits, as in the published figures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from clap_ds.config.model import CHANNELS, NARROWING, AudioConfig, ClapConfig, ProjectionConfig

Convention = Literal["published", "model"]
CONVENTIONS: tuple[Convention, ...] = ("published", "model")
PUBLISHED_ONLY = ("stft_convolution", "tscam_conv")
MODEL_ONLY = ("fft", "stretch")
FRONT_END = ("stft_convolution", "fft", "mel")
"""Components of the front end, which processes waveforms."""
STAGE_VIEWS = ("block_linears", "window_attention", "patch_mergings")
"""Components that split the sum of the stages by operation."""


@dataclass(frozen=True)
class TextLengths:
    """Hold captions' mean length, for linears, and mean square length, for attention."""

    mean: float
    mean_square: float

    @classmethod
    def fixed(cls, num_tokens: int) -> TextLengths:
        """Return the lengths of captions padded to `num_tokens`."""
        return cls(num_tokens, num_tokens**2)

    @classmethod
    def of(cls, lengths: Iterable[int]) -> TextLengths:
        """Return the lengths of packed captions."""
        lengths = list(lengths)
        return cls(fmean(lengths), fmean(length**2 for length in lengths))


def forward_flops(
    config: ClapConfig, lengths: TextLengths, convention: Convention, *, front_end: bool = True
) -> float:
    """Return the FLOPs of one sample's forward pass."""
    return forward_components(config, lengths, convention, front_end=front_end)["forward"]


def backward_flops(
    config: ClapConfig, lengths: TextLengths, *, trained: Collection[str] = ("audio", "text")
) -> float:
    """Return the FLOPs of one sample's backward pass: two products (input and weight gradients) per
    forward product of the trained towers; none for the spectrogram, and one for the stretch, which
    has no weight gradient."""
    parts = forward_components(config, lengths, "model", front_end=False)
    flops = {"audio": 2 * parts["audio_tower"] - parts["stretch"], "text": 2 * parts["text_tower"]}
    return sum(flops[tower] for tower in trained)


def recomputed_flops(
    config: ClapConfig, lengths: TextLengths, checkpointed: Collection[str], *, drop_path: float
) -> float:
    """Return the FLOPs of one sample that activation checkpointing of these towers (`audio`,
    `text`) recomputes. PyTorch stops early: it skips an audio block's last product, unless drop
    path applies to its branch (never to the first block's)."""
    audio = config.audio
    text = forward_components(config, lengths, "model")
    flops = {"audio": sum(linears + attention for linears, attention, _ in _stages(audio))}
    flops["text"] = text["text_linears"] + text["text_attention"]
    last_products = [
        _product(grid**2, audio.mlp_ratio * dim, dim)
        for depth, grid, dim in zip(audio.depths, audio.stage_grids, audio.stage_dims, strict=True)
        for _ in range(depth)
    ]
    flops["audio"] -= last_products[0] if drop_path else sum(last_products)
    return sum(flops[tower] for tower in checkpointed)


def published_flops(config: ClapConfig, *, front_end: bool = True) -> float:
    """Return the FLOPs of one sample as in the published table, with 514 tokens for any captions:
    111.20 (tiny) and 130.09 (base) GFLOPs; 2.17 less without a front end."""
    return forward_flops(
        config, TextLengths.fixed(config.text.max_positions), "published", front_end=front_end
    )


def forward_components(
    config: ClapConfig, lengths: TextLengths, convention: Convention, *, front_end: bool = True
) -> dict[str, float]:
    """Return the FLOPs of one sample's forward pass by component.

    Args:
        convention: `published` counts the STFT as a convolution and the AudioSet head `tscam_conv`,
          but not the stretch of
            the spectrogram. `model` counts what this engine executes: FFTs, the stretch as a matrix
              product, no AudioSet
            head, and only the pooled tokens in the last text layer.
        front_end: whether the input is waveforms; else it is log-mel features, without STFT and mel
          filters.

    Returns:
        FLOPs by name in the model's order; names that a convention doesn't count are 0.
          `STAGE_VIEWS` split the sum of the
        `stage_…` by operation; `audio_tower`, `text_tower` and `forward` are totals.
    """
    audio = _audio_components(config.audio)
    audio["audio_projection"] = _projection(
        config.audio.output_dim, config.audio.projection, config.joint_dim
    )
    audio |= dict.fromkeys(MODEL_ONLY if convention == "published" else PUBLISHED_ONLY, 0.0)
    audio |= {} if front_end else dict.fromkeys(FRONT_END, 0.0)
    text = _text_components(config, lengths, convention)
    audio_tower = sum(flops for name, flops in audio.items() if name not in STAGE_VIEWS)
    totals = {"text_tower": sum(text.values()), "forward": audio_tower + sum(text.values())}
    return {**audio, "audio_tower": audio_tower, **text, **totals}


def fft_flops(num_points: int) -> float:
    """Return the FLOPs of a real FFT: half of a complex one's 5·N·log2(N), as in FFTW's
    benchmarks."""
    return 2.5 * num_points * math.log2(num_points)


def _product(rows: float, inputs: int, outputs: int) -> float:
    return 2.0 * rows * inputs * outputs


def _audio_components(audio: AudioConfig) -> dict[str, float]:
    """Return the audio tower's components in both conventions, without the projection."""
    num_bins = audio.stft_window // 2 + 1
    last_grid = audio.stage_grids[-1]
    width = audio.image_size * audio.freq_ratio
    channels = CHANNELS if audio.fusion else 1
    # The AudioSet head's kernel spans all frequencies and three time steps.
    kernel_height = max(1, last_grid // audio.freq_ratio)
    num_steps = last_grid * (last_grid // kernel_height)
    linears, attention, mergings = zip(*_stages(audio), strict=True)
    return {
        # torchlibrosa: one convolution for the real parts, one for the imaginary parts.
        "stft_convolution": _product(audio.num_frames, audio.stft_window, 2 * num_bins),
        "fft": audio.num_frames * fft_flops(audio.stft_window),
        "mel": _product(audio.num_frames, num_bins, audio.mel_bins),
        # Bicubic in time, a dense matrix in `htsat.FoldToImage`.
        "stretch": channels * _product(audio.mel_bins, audio.num_frames, width)
        if audio.num_frames < width
        else 0.0,
        "patch_embedding": _product(
            audio.stage_grids[0] ** 2, audio.patch_size**2, audio.embed_dim
        ),
        **({"fusion": _fusion(audio)} if audio.fusion else {}),
        **{
            f"stage_{i}": sum(parts)
            for i, parts in enumerate(zip(linears, attention, mergings, strict=True))
        },
        **dict(zip(STAGE_VIEWS, map(sum, (linears, attention, mergings)), strict=True)),
        "tscam_conv": _product(num_steps, audio.output_dim * kernel_height * 3, audio.num_classes),
    }


def _stages(audio: AudioConfig) -> list[tuple[float, float, float]]:
    """Return FLOPs of linears, attention and patch merging per stage."""
    found = []
    for dim, depth, grid in zip(audio.stage_dims, audio.depths, audio.stage_grids, strict=True):
        # Query, key, value and output: 4·C² per token; the MLP's two layers: 2·ratio·C².
        linears = _product(depth * grid**2, dim, (4 + 2 * audio.mlp_ratio) * dim)
        attention = _product(depth * grid**2, min(audio.attention_window, grid) ** 2, 2 * dim)
        found.append(
            (
                linears,
                attention,
                _product(grid**2 // 4, 4 * dim, 2 * dim) * (grid != audio.stage_grids[-1]),
            )
        )
    return found


def _fusion(audio: AudioConfig) -> float:
    """Count the tokens of the file's parts, and twice two layers of attention: per position and on
    their mean."""
    grid = audio.stage_grids[0]
    part = 3 * audio.patch_size
    tokens = _product(
        (CHANNELS - 1) * grid * (audio.image_size // part), part * audio.patch_size, audio.embed_dim
    )
    return tokens + 2 * _product(grid**2 + 1, audio.embed_dim, audio.embed_dim // NARROWING)


def _text_components(
    config: ClapConfig, lengths: TextLengths, convention: Convention
) -> dict[str, float]:
    text = config.text
    width = text.hidden_size
    rows = text.num_layers * lengths.mean
    has_pooler = text.pooling == "cls_pooler"
    # In the last layer, only the first token is used after the attention.
    first_alone = convention == "model" and text.ends_with_first_token
    rows_past_attention = rows - (lengths.mean - 1 if first_alone else 0)
    past_attention = _product(rows_past_attention, width, width + 2 * text.intermediate_size)
    return {
        "text_linears": _product(rows, width, 3 * width) + past_attention,
        "text_attention": 2 * _product(text.num_layers, 1, width) * lengths.mean_square,
        "text_pooler": _product(1, width, width) if has_pooler else 0.0,
        "text_projection": _projection(width, text.projection, config.joint_dim),
    }


def _projection(inputs: int, projection: ProjectionConfig, joint_dim: int) -> float:
    return _product(1, projection.hidden_dim, inputs + joint_dim)
