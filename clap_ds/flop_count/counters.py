"""The same forward cost as `flops_analytic.py`, counted by looking at the model: DeepSpeed's profiler and torch's.

DeepSpeed's profiler watches one sample run through the model on the CPU. torch's counter watches fake tensors: operations
are dispatched with their shapes and none is computed. (DeepSpeed's patches would also count inside the fake kernels.) What
a counter can't see is counted apart, from the shapes of the calls themselves, and named: never folded in silently.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from clap_ds.config.model import PAD_TOKEN_ID, AudioConfig, ClapConfig
from clap_ds.flop_count.analytic import Convention, fft_flops
from clap_ds.model.clap import ClapModel

aten = torch.ops.aten
ATTENTION = "attention (SDPA on CPU)"
FFT = "FFT"
BROADCAST = "broadcast matrix products"


@dataclass
class Count:
    """FLOPs of one forward pass.

    Attributes:
        counted: what the counter says by itself.
        unseen: what it can't see, by name, counted from the shapes of the same run.
        element_wise: what the counter adds for norms, softmax and activations (DeepSpeed's own "flops" above 2 × MACs).
    """

    counted: float
    unseen: dict[str, float] = field(default_factory=dict)
    element_wise: float = 0.0

    @property
    def total(self) -> float:
        """Matrix products, convolutions and FFTs: what the closed form counts."""
        return self.counted + sum(self.unseen.values())


def count_by_deepspeed(config: ClapConfig, text_tokens: int, convention: Convention) -> Count:
    """2 × MACs of DeepSpeed's flops profiler for one sample."""
    model = build_for_counting(config, convention)
    materialise(model)
    last = config.text.max_positions - 1

    def share_last_position(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # RoBERTa numbers tokens from 2, so of its 514 positions it can use 512: the two tokens past them share the last.
        positions = torch.arange(PAD_TOKEN_ID + 1, PAD_TOKEN_ID + 1 + text_tokens).clamp(max=last)
        return args, {**kwargs, "position_ids": positions[None]}

    model.text.roberta.embeddings.register_forward_pre_hook(share_last_position, with_kwargs=True)
    return profile_by_deepspeed(FlopsProfiler(model), lambda: forward_one_sample(model, text_tokens))


def profile_by_deepspeed(
    profiler: FlopsProfiler, forward: Callable[[], object], report: Callable[[], None] | None = None
) -> Count:
    """What DeepSpeed's profiler counts, and what it leaves out, while `forward` runs the profiler's model once.

    Args:
        profiler: ended afterwards, so that a later one starts from nothing.
        forward: one forward pass.
        report: called before the profiler ends, to print its report.
    """
    with unseen_by_deepspeed() as unseen:
        profiler.start_profile()
        try:
            forward()
            profiler.stop_profile()
            count = Count(2.0 * profiler.get_total_macs(), dict(unseen))
            count.element_wise = profiler.get_total_flops() - count.counted
            if report is not None:
                report()
        finally:
            profiler.end_profile()
    return count


@contextmanager
def unseen_by_deepspeed() -> Iterator[dict[str, float]]:
    """Tally, by name, the FLOPs that DeepSpeed's profiler leaves out of its MACs.

    It has no formula for FFTs, and of a matrix product whose first operand is broadcast over a batch it counts one. To be
    entered before the profiler starts: it wraps the same functions.
    """
    flops: dict[str, float] = defaultdict(float)

    def note_fft(result: Tensor, input: Tensor, n_fft: int, *args: Any, **kwargs: Any) -> None:
        num_frames = result.shape[-1] * math.prod(input.shape[:-1])
        flops[FFT] += num_frames * fft_flops(n_fft)

    def note_broadcast(result: Tensor, input: Tensor, other: Tensor, **kwargs: Any) -> None:
        if input.ndim >= 2 and other.ndim >= 2:
            missed = result.numel() * input.shape[-1] - input.numel() * other.shape[-1]
            if missed:
                flops[BROADCAST] += 2 * missed

    targets: list[tuple[Any, str, Callable[..., None]]] = [
        (torch, "stft", note_fft),
        (torch, "matmul", note_broadcast),
        (Tensor, "matmul", note_broadcast),
        (Tensor, "__matmul__", note_broadcast),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]
    for owner, name, note in targets:
        setattr(owner, name, _noting(getattr(owner, name), note))
    try:
        yield flops
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _noting(function: Callable[..., Tensor], note: Callable[..., None]) -> Callable[..., Tensor]:
    def noted(*args: Any, **kwargs: Any) -> Tensor:
        result = function(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    return noted


def count_by_torch(config: ClapConfig, text_tokens: int, convention: Convention) -> Count:
    """torch's FlopCounterMode for one sample, on CPU tensors, where it doesn't know the attention kernel."""
    unseen: dict[str, float] = defaultdict(float)

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        unseen[ATTENTION] += sdpa_flop_count(query, key, value)
        return 0

    def real_fft(shape: Any, dims: Any, *args: Any, **kwargs: Any) -> int:
        points = math.prod(shape[dim] for dim in dims)
        unseen[FFT] += math.prod(shape) / points * fft_flops(points)
        return 0

    formulas = {aten._scaled_dot_product_flash_attention_for_cpu: attention, aten._fft_r2c: real_fft}
    model = build_for_counting(config, convention)
    with FakeTensorMode():
        materialise(model)
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            forward_one_sample(model, text_tokens)
    return Count(float(counter.get_total_flops()), dict(unseen))


def build_for_counting(config: ClapConfig, convention: Convention) -> ClapModel:
    """The model on the meta device, in evaluation; in the `published` convention with what the published runs did otherwise."""
    with torch.device("meta"):
        model = ClapModel(config).eval()
        if convention == "published":
            model.text.compute_every_token()
            model.add_module("mel", ConvolutionLogMel(config.audio))
            model.audio.add_module("fold", InterpolatingFold(config.audio))
            model.audio.add_module("norm", NormWithAudioSetHead(config.audio))
    return model


def materialise(model: nn.Module, *, requires_grad: bool = False) -> None:
    """Give a model built on the meta device CPU tensors of zeros in place; fake ones under `FakeTensorMode`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
                module._parameters[name] = nn.Parameter(zeros, requires_grad=requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


@torch.no_grad()
def forward_one_sample(model: ClapModel, text_tokens: int) -> None:
    """One pair with a caption of `text_tokens` real tokens, by operations that counters know."""
    waveforms = torch.zeros(1, model.config.audio.num_samples)
    model(waveforms, torch.full((1, text_tokens), PAD_TOKEN_ID + 1), None)


class ConvolutionLogMel(nn.Module):
    """The published runs' front end in shape and cost: torchlibrosa's STFT as two convolutions, then the mel product.

    For counting only: its weights are not those of a Fourier transform.
    """

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        num_bins = config.stft_window // 2 + 1
        self.padding = config.stft_window // 2
        self.real = nn.Conv1d(1, num_bins, config.stft_window, stride=config.hop_size, bias=False)
        self.imaginary = nn.Conv1d(1, num_bins, config.stft_window, stride=config.hop_size, bias=False)
        self.mel_filters = nn.Parameter(torch.empty(num_bins, config.mel_bins))

    def forward(self, waveforms: Tensor) -> Tensor:
        padded = F.pad(waveforms[:, None], (self.padding, self.padding), mode="reflect")
        power = self.real(padded) ** 2 + self.imaginary(padded) ** 2
        return torch.matmul(power.transpose(1, 2), self.mel_filters).clamp(min=1e-10).log10()


class InterpolatingFold(nn.Module):
    """The fold into an image with the stretch as an interpolation, which no counter takes for multiply-adds."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.image_size, self.freq_ratio = config.image_size, config.freq_ratio

    def forward(self, mel_BFT: Tensor) -> Tensor:
        size = (mel_BFT.shape[1], self.image_size * self.freq_ratio)
        stretched = F.interpolate(mel_BFT[:, None], size, mode="bicubic", align_corners=True)[:, 0]
        segments = stretched.unflatten(2, (self.freq_ratio, self.image_size))
        return segments.transpose(1, 2).reshape(mel_BFT.shape[0], 1, self.image_size, self.image_size)


class NormWithAudioSetHead(nn.LayerNorm):
    """The last norm, followed by HTSAT's AudioSet head, whose result is dropped as the contrastive loss drops it."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config.output_dim)
        self.kernel_height = max(1, config.stage_grids[-1] // config.freq_ratio)
        kernel = (self.kernel_height, 3)
        self.tscam_conv = nn.Conv2d(config.output_dim, config.num_classes, kernel, padding=(0, 1))

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        normed = super().forward(tokens_BHWC)
        # Rows of the grid are time segments of `kernel_height` frequencies each: lay the segments side by side.
        segments = normed.permute(0, 3, 1, 2).unflatten(2, (-1, self.kernel_height))
        self.tscam_conv(segments.transpose(2, 3).flatten(3))
        return normed
