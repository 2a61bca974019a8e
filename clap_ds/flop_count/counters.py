"""Count forward FLOPs, as in `analytic`, with DeepSpeed's profiler while one sample runs through
the model on the CPU.

It only counts torch's operations, so the model must not be converted by
`clap_ds.cpu_kernels.patch_model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import Tensor

from clap_ds.config.model import ClapConfig
from clap_ds.flop_count.analytic import fft_flops
from clap_ds.model.clap import ClapModel


class Count(NamedTuple):
    """One forward pass's FLOPs: the profiler's count, and what it misses."""

    counted: float
    ffts: float


def build(config: ClapConfig) -> ClapModel:
    """Build a model for counting, in evaluation mode on the CPU, with uninitialized weights."""
    with torch.device("meta"):
        model = ClapModel(config).eval().requires_grad_(False)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        # Some are indices, which must be within bounds.
        buffer.zero_()
    return model


def parameter_counts(model: ClapModel) -> dict[str, int]:
    """Return parameters per tower (with projection) and in total as open_clip counts them, and
    trainable ones.

    open_clip's audio tower includes frozen STFT and mel matrices and the AudioSet head.
    """
    trainable = _num_elements(model.parameters())
    text = _num_elements(model.text.parameters()) + _num_elements(
        model.text_projection.parameters()
    )
    head = _num_elements(model.audio.tscam_conv.buffers()) + _num_elements(
        model.audio.head.buffers()
    )
    # Two convolution kernels, for the real and imaginary parts of each frequency.
    stft = 2 * (model.mel.num_fft // 2 + 1) * model.mel.num_fft
    total = trainable + head + stft + model.mel.mel_filters.numel()
    logit_scale = 1
    audio = total - text - logit_scale
    return {"audio": audio, "text": text, "total": total, "trainable": trainable}


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def count_by_deepspeed(model: ClapModel, context_length: int, audio: Tensor | None = None) -> Count:
    """Count the FLOPs of one clip (by default a waveform) and a caption of `context_length`.

    The length is at most the rows of the position table.
    """
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
    # A multiply-add is two FLOPs.
    return Count(2.0 * macs, sum(ffts))


@contextmanager
def counted_ffts() -> Iterator[list[float]]:
    """Yield the FLOPs of FFTs, which DeepSpeed's profiler misses, by the shapes of calls.

    Enter it before the profiler starts, which wraps the same functions.
    """
    flops: list[float] = []
    stft = torch.stft

    def count_stft(input: Tensor, n_fft: int, *args: Any, **kwargs: Any) -> Tensor:
        spectrum = stft(input, n_fft, *args, **kwargs)
        # One FFT per frame (the last dimension) and row.
        num_ffts = spectrum.shape[-1] * math.prod(input.shape[:-1])
        flops.append(num_ffts * fft_flops(n_fft))
        return spectrum

    with replaced_attributes(torch, stft=count_stft):
        yield flops


@contextmanager
def replaced_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or class in the body, and restore them at its end.

    An attribute that the target inherits or lacks is removed at the end.
    """
    # From `vars`, because `getattr` would bind class methods.
    originals = {name: vars(target)[name] for name in values if name in vars(target)}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in originals:
                setattr(target, name, originals[name])
            else:
                delattr(target, name)
