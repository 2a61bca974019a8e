"""Compute the FLOPs of a CLAP model in closed form from its sizes. Imports no torch.

Counts 2 FLOPs per multiply-add of every matrix product and convolution. Omits element-wise
operations, norms, softmax and the loss's logits, as in the published figures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from clap_ds.config.model import CHANNELS, NARROWING, AudioConfig, ClapConfig, ProjectionConfig

Convention = Literal["published", "model"]
CONVENTIONS: tuple[Convention, ...] = ("published", "model")
PUBLISHED_ONLY = ("stft_convolution", "tscam_conv")
MODEL_ONLY = ("fft", "stretch")
# Components of the front end, which processes waveforms.
FRONT_END = ("stft_convolution", "fft", "mel")
# Components that split the sum of the stages by operation.
STAGE_VIEWS = ("block_linears", "window_attention", "patch_mergings")


@dataclass(frozen=True)
class TextLengths:
    """Captions' mean length, for linears, and mean square length, for attention."""

    mean: float
    mean_square: float

    @classmethod
    def fixed(cls, num_tokens: int) -> TextLengths:
        """Return the lengths of captions padded to `num_tokens`."""
        return cls(num_tokens, num_tokens**2)

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> TextLengths:
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
    """Return the FLOPs of one sample's backward pass.

    Each forward product of the trained towers has two: the input's and the weight's gradients. The
    spectrogram has none, and the stretch one, as it has no weight.
    """
    parts = forward_components(config, lengths, "model", front_end=False)
    flops = {"audio": 2 * parts["audio_tower"] - parts["stretch"], "text": 2 * parts["text_tower"]}
    return sum(flops[tower] for tower in trained)


def recomputed_flops(
    config: ClapConfig, lengths: TextLengths, checkpointed: Collection[str], *, drop_path: float
) -> float:
    """Return the FLOPs of one sample that activation checkpointing of these towers (`audio`,
    `text`) recomputes.

    PyTorch stops early: it skips an audio block's last product, unless drop path applies to its
    branch (never to the first block's).
    """
    recomputed = 0.0
    if "audio" in checkpointed:
        audio = config.audio
        recomputed += sum(stage.linears + stage.attention for stage in _stages(audio))
        skipped = []
        for depth, grid, dim in zip(audio.depths, audio.stage_grids, audio.stage_dims, strict=True):
            # The MLP's second layer.
            skipped += [_product(grid**2, audio.mlp_ratio * dim, dim)] * depth
        recomputed -= skipped[0] if drop_path else sum(skipped)
    if "text" in checkpointed:
        text = forward_components(config, lengths, "model")
        recomputed += text["text_linears"] + text["text_attention"]
    return recomputed


def published_flops(config: ClapConfig, *, front_end: bool = True) -> float:
    """Return the FLOPs of one sample as in the published table, with 514 tokens for any captions.

    They are 111.20 (tiny) and 130.09 (base) GFLOPs; 2.17 less without a front end.
    """
    lengths = TextLengths.fixed(config.text.max_positions)
    return forward_flops(config, lengths, "published", front_end=front_end)


def forward_components(
    config: ClapConfig, lengths: TextLengths, convention: Convention, *, front_end: bool = True
) -> dict[str, float]:
    """Return the FLOPs of one sample's forward pass by component.

    Args:
        convention: `published` counts the STFT as a convolution and the AudioSet head `tscam_conv`,
            but not the stretch of the spectrogram. `model` counts what this engine executes: FFTs,
            the stretch as a matrix product, no AudioSet head, and only the pooled tokens in the
            last text layer.
        front_end: whether the input is waveforms; else it is log-mel features, without STFT and mel
            filters.

    Returns:
        FLOPs by name in the model's order; names that a convention doesn't count are 0.
        `STAGE_VIEWS` split the sum of the `stage_…` by operation; `audio_tower`, `text_tower` and
        `forward` are totals.
    """
    audio = _audio_components(config.audio)
    audio["audio_projection"] = _projection(
        config.audio.output_dim, config.audio.projection, config.joint_dim
    )
    uncounted = MODEL_ONLY if convention == "published" else PUBLISHED_ONLY
    audio |= dict.fromkeys(uncounted, 0.0)
    if not front_end:
        audio |= dict.fromkeys(FRONT_END, 0.0)
    text = _text_components(config, lengths, convention)
    text_tower = sum(text.values())
    # The views would count the stages twice.
    audio_tower = sum(flops for name, flops in audio.items() if name not in STAGE_VIEWS)
    totals = {"text_tower": text_tower, "forward": audio_tower + text_tower}
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
    components = {
        # torchlibrosa: one convolution for the real parts, one for the imaginary parts.
        "stft_convolution": _product(audio.num_frames, audio.stft_window, 2 * num_bins),
        "fft": audio.num_frames * fft_flops(audio.stft_window),
        "mel": _product(audio.num_frames, num_bins, audio.mel_bins),
        "stretch": _stretch(audio),
        "patch_embedding": _product(
            audio.stage_grids[0] ** 2, audio.patch_size**2, audio.embed_dim
        ),
    }
    if audio.fusion:
        components["fusion"] = _fusion(audio)
    stages = _stages(audio)
    for number, stage in enumerate(stages):
        components[f"stage_{number}"] = stage.linears + stage.attention + stage.merging
    components["block_linears"] = sum(stage.linears for stage in stages)
    components["window_attention"] = sum(stage.attention for stage in stages)
    components["patch_mergings"] = sum(stage.merging for stage in stages)
    # The AudioSet head's kernel spans all frequencies and three time steps.
    last_grid = audio.stage_grids[-1]
    kernel_height = max(1, last_grid // audio.freq_ratio)
    num_steps = last_grid * (last_grid // kernel_height)
    num_inputs = audio.output_dim * kernel_height * 3
    components["tscam_conv"] = _product(num_steps, num_inputs, audio.num_classes)
    return components


def _stretch(audio: AudioConfig) -> float:
    """Count the stretch of short spectrograms: bicubic in time, a dense matrix in
    `htsat.FoldToImage`."""
    width = audio.image_size * audio.freq_ratio
    if audio.num_frames >= width:
        return 0.0
    channels = CHANNELS if audio.fusion else 1
    return channels * _product(audio.mel_bins, audio.num_frames, width)


class _StageFlops(NamedTuple):
    """FLOPs of a stage's blocks, and of the patch merging after them."""

    linears: float
    attention: float
    merging: float


def _stages(audio: AudioConfig) -> list[_StageFlops]:
    stages = []
    for dim, depth, grid in zip(audio.stage_dims, audio.depths, audio.stage_grids, strict=True):
        # Query, key, value and output: 4·C² per token; the MLP's two layers: 2·ratio·C².
        linears = _product(depth * grid**2, dim, (4 + 2 * audio.mlp_ratio) * dim)
        # Scores and mixed values: 2·C per token and token of its window.
        window_tokens = min(audio.attention_window, grid) ** 2
        attention = _product(depth * grid**2, window_tokens, 2 * dim)
        # Four tokens become one of twice the width.
        is_last = grid == audio.stage_grids[-1]
        merging = 0.0 if is_last else _product(grid**2 // 4, 4 * dim, 2 * dim)
        stages.append(_StageFlops(linears, attention, merging))
    return stages


def _fusion(audio: AudioConfig) -> float:
    """Count the tokens of the file's parts, and twice two layers of attention: per position and on
    their mean."""
    grid = audio.stage_grids[0]
    # The convolution of the parts is three patches wide.
    part_width = 3 * audio.patch_size
    num_tokens = (CHANNELS - 1) * grid * (audio.image_size // part_width)
    tokens = _product(num_tokens, part_width * audio.patch_size, audio.embed_dim)
    return tokens + 2 * _product(grid**2 + 1, audio.embed_dim, audio.embed_dim // NARROWING)


def _text_components(
    config: ClapConfig, lengths: TextLengths, convention: Convention
) -> dict[str, float]:
    text = config.text
    width = text.hidden_size
    rows = text.num_layers * lengths.mean
    rows_past_attention = rows
    # In the last layer, only the first token is used after the attention.
    if convention == "model" and text.ends_with_first_token:
        rows_past_attention -= lengths.mean - 1
    # Query, key and value; then output and the MLP's two layers.
    linears = _product(rows, width, 3 * width)
    linears += _product(rows_past_attention, width, width + 2 * text.intermediate_size)
    has_pooler = text.pooling == "cls_pooler"
    return {
        "text_linears": linears,
        # Scores and mixed values.
        "text_attention": 2 * _product(text.num_layers, 1, width) * lengths.mean_square,
        "text_pooler": _product(1, width, width) if has_pooler else 0.0,
        "text_projection": _projection(width, text.projection, config.joint_dim),
    }


def _projection(inputs: int, projection: ProjectionConfig, joint_dim: int) -> float:
    return _product(1, projection.hidden_dim, inputs + joint_dim)
