"""Forward cost of a CLAP model in closed form, from its sizes alone.

Imports no torch. Counts 2 FLOPs per multiply-add of every matrix product and convolution; element-wise work, norms, softmax
and the loss's logits are left out, as in the published figures.
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
"""What is done to waveforms alone."""
STAGE_VIEWS = ("block_linears", "window_attention", "patch_mergings")
"""Components that divide the sum of the stages another way."""


@dataclass(frozen=True)
class TextLengths:
    """How long captions are, for linears (the mean) and attention (the mean square)."""

    mean: float
    mean_square: float

    @classmethod
    def fixed(cls, num_tokens: int) -> TextLengths:
        """Every caption takes `num_tokens`, as when captions are padded."""
        return cls(num_tokens, num_tokens**2)

    @classmethod
    def of(cls, lengths: Iterable[int]) -> TextLengths:
        """Captions that take only their own length, as when they are packed."""
        lengths = list(lengths)
        return cls(fmean(lengths), fmean(length**2 for length in lengths))


def forward_flops(config: ClapConfig, lengths: TextLengths, convention: Convention, *, front_end: bool = True) -> float:
    """FLOPs of one sample's forward pass."""
    return forward_components(config, lengths, convention, front_end=front_end)["forward"]


def backward_flops(config: ClapConfig, lengths: TextLengths, *, trained: Collection[str] = ("audio", "text")) -> float:
    """FLOPs of one sample's backward pass: two products for each of these towers' forward pass, by its input and by its
    weight. The spectrogram has none and the stretch, which isn't learned, one."""
    parts = forward_components(config, lengths, "model", front_end=False)
    flops = {"audio": 2 * parts["audio_tower"] - parts["stretch"], "text": 2 * parts["text_tower"]}
    return sum(flops[tower] for tower in trained)


def recomputed_flops(
    config: ClapConfig, lengths: TextLengths, checkpointed: Collection[str], *, drop_path: float
) -> float:
    """FLOPs of one sample's forward pass that the backward pass does again, with the blocks of these towers (`audio`,
    `text`) checkpointed. PyTorch stops where it has what it needs: not at an audio block's last product, unless the branch
    that it ends is dropped now and then (the first block's never is)."""
    audio, text = config.audio, forward_components(config, lengths, "model")
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
    """FLOPs of one sample as the published table counts them, whatever a run's captions: 111.20 (tiny) and 130.09 (base)
    GFLOPs, of 514 tokens, and 2.17 less without a front end."""
    return forward_flops(config, TextLengths.fixed(config.text.max_positions), "published", front_end=front_end)


def forward_components(
    config: ClapConfig, lengths: TextLengths, convention: Convention, *, front_end: bool = True
) -> dict[str, float]:
    """FLOPs of one sample's forward pass by component.

    Args:
        convention: `published` counts the STFT as a convolution and the AudioSet head `tscam_conv`, and the stretch of
            the spectrogram as nothing; `model` counts what this engine executes: FFTs, the stretch as the matrix
            product it is, no AudioSet head, and in the last text layer only the tokens that are pooled.
        front_end: the model is fed waveforms; else log-mel features, and neither STFT nor mel filters count.

    Returns:
        FLOPs by name, in the model's order, the same names in both conventions; 0 where one doesn't count. `STAGE_VIEWS`
        divide the sum of the `stage_…` another way; `audio_tower`, `text_tower` and `forward` are totals.
    """
    audio = _audio_components(config.audio)
    audio["audio_projection"] = _projection(config.audio.output_dim, config.audio.projection, config.joint_dim)
    audio |= dict.fromkeys(MODEL_ONLY if convention == "published" else PUBLISHED_ONLY, 0.0)
    audio |= {} if front_end else dict.fromkeys(FRONT_END, 0.0)
    text = _text_components(config, lengths, convention)
    audio_tower = sum(flops for name, flops in audio.items() if name not in STAGE_VIEWS)
    totals = {"text_tower": sum(text.values()), "forward": audio_tower + sum(text.values())}
    return {**audio, "audio_tower": audio_tower, **text, **totals}


def fft_flops(num_points: int) -> float:
    """One FFT of real input: half of the 5·N·log2(N) of a complex one, as FFTW's benchmarks count it."""
    return 2.5 * num_points * math.log2(num_points)


def _product(rows: float, inputs: int, outputs: int) -> float:
    return 2.0 * rows * inputs * outputs


def _audio_components(audio: AudioConfig) -> dict[str, float]:
    """Those of both conventions, the projection left out."""
    num_bins, last_grid = audio.stft_window // 2 + 1, audio.stage_grids[-1]
    width, channels = audio.image_size * audio.freq_ratio, CHANNELS if audio.fusion else 1
    # The AudioSet head's kernel spans the frequencies and three steps of time.
    kernel_height = max(1, last_grid // audio.freq_ratio)
    num_steps = last_grid * (last_grid // kernel_height)
    linears, attention, mergings = zip(*_stages(audio), strict=True)
    return {
        # torchlibrosa: one convolution for the real parts, one for the imaginary parts.
        "stft_convolution": _product(audio.num_frames, audio.stft_window, 2 * num_bins),
        "fft": audio.num_frames * fft_flops(audio.stft_window),
        "mel": _product(audio.num_frames, num_bins, audio.mel_bins),
        # In time, bicubic, which `htsat.FoldToImage` holds as a dense matrix.
        "stretch": channels * _product(audio.mel_bins, audio.num_frames, width) if audio.num_frames < width else 0.0,
        "patch_embedding": _product(audio.stage_grids[0] ** 2, audio.patch_size**2, audio.embed_dim),
        **({"fusion": _fusion(audio)} if audio.fusion else {}),
        **{f"stage_{i}": sum(parts) for i, parts in enumerate(zip(linears, attention, mergings, strict=True))},
        **dict(zip(STAGE_VIEWS, map(sum, (linears, attention, mergings)), strict=True)),
        "tscam_conv": _product(num_steps, audio.output_dim * kernel_height * 3, audio.num_classes),
    }


def _stages(audio: AudioConfig) -> list[tuple[float, float, float]]:
    """Linears, attention and patch merging of each stage."""
    found = []
    for dim, depth, grid in zip(audio.stage_dims, audio.depths, audio.stage_grids, strict=True):
        # Query, key, value and output: 4·C² a token; the MLP's two layers: 2·ratio·C².
        linears = _product(depth * grid**2, dim, (4 + 2 * audio.mlp_ratio) * dim)
        attention = _product(depth * grid**2, min(audio.attention_window, grid) ** 2, 2 * dim)
        found.append((linears, attention, _product(grid**2 // 4, 4 * dim, 2 * dim) * (grid != audio.stage_grids[-1])))
    return found


def _fusion(audio: AudioConfig) -> float:
    """Tokens of the file's parts, and twice two layers of attention: of each place and of their mean."""
    grid, part = audio.stage_grids[0], 3 * audio.patch_size
    tokens = _product((CHANNELS - 1) * grid * (audio.image_size // part), part * audio.patch_size, audio.embed_dim)
    return tokens + 2 * _product(grid**2 + 1, audio.embed_dim, audio.embed_dim // NARROWING)


def _text_components(config: ClapConfig, lengths: TextLengths, convention: Convention) -> dict[str, float]:
    text = config.text
    width, rows, has_pooler = text.hidden_size, text.num_layers * lengths.mean, text.pooling == "cls_pooler"
    # Of the last layer, only the first token goes on past the attention.
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
