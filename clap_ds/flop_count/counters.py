"""Count forward FLOPs, as in `analytic`, with DeepSpeed's profiler while one sample runs through
the model on the CPU.

It only counts torch's operations, so the model must not be converted by
`clap_ds.cpu_kernels.patch_model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import Tensor

from clap_ds.config.model import ClapConfig
from clap_ds.flop_count.analytic import fft_flops
from clap_ds.model.clap import ClapModel


class Count(NamedTuple):
    """Hold one forward pass's FLOPs: the profiler's count, and what it misses."""

    counted: float
    ffts: float


def build(config: ClapConfig) -> ClapModel:
    """Build a model for counting, in evaluation mode on the CPU, with uninitialized weights."""
    with torch.device("meta"):
        model = ClapModel(config).eval().requires_grad_(False)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()  # some are indices
    return model


def parameter_counts(model: ClapModel) -> dict[str, int]:
    """Return parameters per tower (with projection) and in total as open_clip counts them, and
    trainable ones. Its audio tower includes frozen STFT and mel matrices and the AudioSet head."""
    trainable = sum(parameter.numel() for parameter in model.parameters())
    text = sum(
        parameter.numel()
        for part in (model.text, model.text_projection)
        for parameter in part.parameters()
    )
    unused = sum(
        buffer.numel()
        for part in (model.audio.tscam_conv, model.audio.head)
        for buffer in part.buffers()
    )
    stft = 2 * (model.mel.num_fft // 2 + 1) * model.mel.num_fft
    total = trainable + unused + stft + model.mel.mel_filters.numel()
    return {"audio": total - text - 1, "text": text, "total": total, "trainable": trainable}


def count_by_deepspeed(model: ClapModel, context_length: int, audio: Tensor | None = None) -> Count:
    """Count the FLOPs of one clip (by default a waveform) and a caption of `context_length`, at
    most the position table's rows."""
    if audio is None:
        audio = torch.zeros(1, model.config.audio.num_samples)
    caption = torch.ones(1, context_length, dtype=torch.long)
    profiler = FlopsProfiler(model)
    with counted_ffts() as ffts:
        profiler.start_profile()
        model(audio, caption, None)
        profiler.stop_profile()
        macs = profiler.get_total_macs()
        profiler.end_profile()
    return Count(2.0 * macs, sum(ffts))


@contextmanager
def counted_ffts() -> Iterator[list[float]]:
    """Yield the FLOPs of FFTs, which DeepSpeed's profiler misses, by the shapes of calls. Enter it
    before the profiler starts, which wraps the same functions."""
    flops = list[float]()
    stft = torch.stft

    def counted(input: Tensor, n_fft: int, *args: Any, **kwargs: Any) -> Tensor:
        result = stft(input, n_fft, *args, **kwargs)
        flops.append(result.shape[-1] * math.prod(input.shape[:-1]) * fft_flops(n_fft))
        return result

    with mock.patch.object(torch, "stft", counted):
        yield flops
