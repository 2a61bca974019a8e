"""Count forward FLOPs, as in `analytic`, with DeepSpeed's profiler while one sample runs through the model on the CPU.

It only counts torch's operations, so the model must not be converted by `clap_ds.cpu_kernels.patch_model`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import Tensor

from clap_ds.config.model import ClapConfig
from clap_ds.flop_count.analytic import fft_flops
from clap_ds.model.clap import ClapModel

FFT = "FFT"
BROADCAST = "broadcast matrix products"
PRODUCTS: list[tuple[Any, str]] = [(torch, "matmul"), (Tensor, "matmul"), (Tensor, "__matmul__")]


@dataclass
class Count:
    """Hold one forward pass's FLOPs: the profiler's count, and by name what it misses."""

    counted: float
    unseen: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.counted + sum(self.unseen.values())


def build(config: ClapConfig) -> ClapModel:
    """Build a model for counting, in evaluation mode on the CPU, with uninitialized weights."""
    with torch.device("meta"):
        model = ClapModel(config).eval().requires_grad_(False)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()  # some are indices
    return model


def parameter_counts(model: ClapModel) -> dict[str, int]:
    """Return parameters per tower (with projection) and in total as open_clip counts them, and trainable ones. Its audio
    tower includes frozen STFT and mel matrices and the AudioSet head."""
    trainable = sum(parameter.numel() for parameter in model.parameters())
    text = sum(parameter.numel() for part in (model.text, model.text_projection) for parameter in part.parameters())
    unused = sum(buffer.numel() for part in (model.audio.tscam_conv, model.audio.head) for buffer in part.buffers())
    stft = 2 * (model.mel.num_fft // 2 + 1) * model.mel.num_fft
    total = trainable + unused + stft + model.mel.mel_filters.numel()
    return {"audio": total - text - 1, "text": text, "total": total, "trainable": trainable}


def count_by_deepspeed(model: ClapModel, context_length: int) -> Count:
    """Count the FLOPs of one waveform and a caption of `context_length`, at most the position table's rows."""
    waveform, caption = torch.zeros(1, model.config.audio.num_samples), torch.ones(1, context_length, dtype=torch.long)
    return profile_by_deepspeed(FlopsProfiler(model), lambda: model(waveform, caption, None))


def profile_by_deepspeed(profiler: FlopsProfiler, forward: Callable[[], object]) -> Count:
    """Count FLOPs with DeepSpeed's profiler, and those it misses, while `forward` runs its model once."""
    with unseen_by_deepspeed() as unseen:
        profiler.start_profile()
        try:
            forward()
            profiler.stop_profile()
            return Count(2.0 * profiler.get_total_macs(), dict(unseen))
        finally:
            profiler.end_profile()


@contextmanager
def unseen_by_deepspeed() -> Iterator[dict[str, float]]:
    """Count FLOPs that DeepSpeed's profiler misses, by name, from the shapes of calls: FFTs, and all but one of the
    products with a first operand that is broadcast over a batch. Enter it before the profiler starts, which wraps the
    same functions."""
    flops: dict[str, float] = defaultdict(float)

    def noting(function: Callable[..., Any], name: str, formula: Callable[..., float]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if found := formula(result, *args, **kwargs):
                flops[name] += found
            return result

        return noted

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "stft", noting(torch.stft, FFT, _stft)))
        for owner, name in PRODUCTS:
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name), BROADCAST, _missed)))
        yield flops


def _stft(result: Tensor, input: Tensor, n_fft: int, *args: Any, **kwargs: Any) -> float:
    return result.shape[-1] * math.prod(input.shape[:-1]) * fft_flops(n_fft)


def _missed(result: Tensor, input: Tensor, other: Tensor) -> float:
    if min(input.ndim, other.ndim) < 2:
        return 0.0
    return 2.0 * (result.numel() * input.shape[-1] - input.numel() * other.shape[-1])
