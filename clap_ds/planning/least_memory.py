"""Reject a run whose training step can't fit in memory, before anything is allocated.

The bound counts only what exists at once from the second step on, whichever kernels run: weights
and optimizer state, and with them either all gradients, or the batches and what the backward pass
of all blocks needs. It omits temporary tensors, libraries, front end, projections and loss, and of
open_clip's models everything but the batches.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from clap_ds.config.schema import SyntheticData
from clap_ds.config.settings import RunSettings
from clap_ds.distributed.collectives import raise_on_all_ranks, reduce_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.engine.compile import resolve_compile_mode
from clap_ds.engine.factory import ADAMS, build_model
from clap_ds.flop_count.analytic import TextLengths, forward_flops
from clap_ds.run_records.environment import MemoryLimit, memory_limits
from clap_ds.utils.errors import CollectiveUserError, count_of

# Of this project's bf16 kernels with AVX-512. AMX is twice as fast (`results/cpu`), torch's
# operations slower.
TFLOPS_PER_CORE = 0.15
SLOW_STEP_S = 60.0
# By `clap.bench.find_micro_batch`.
SMALLEST_TRIED = 8


class TooLittleMemoryError(CollectiveUserError):
    """A run can't fit in memory; raised on all ranks."""


def advise_on_memory(device_type: str) -> str:
    """Return what to do if a device's memory is too small, `cuda` or `cpu`."""
    advice = "reduce train_micro_batch_size_per_gpu, or set clap.model.activation_checkpointing"
    if device_type == "cuda":
        return (
            f"{advice} (`clap-ds plan --find_micro_batch` calculates the largest micro-batch that fits,"
            " `clap.bench.find_micro_batch` measures it)"
        )
    return f"{advice}, or run a packaged configuration for CPUs: htsat_tiny_cpu or, to train, train_demo_cpu"


class LeastMemory(NamedTuple):
    """Bytes that one rank needs at least."""

    state: int  # weights, fp32 master weights, moments, moving average
    gradients: int
    per_sample: int  # of the micro-batch: batches and activations

    def total(self, micro_batch: int) -> int:
        return self.state + max(self.gradients, micro_batch * self.per_sample)

    def largest_micro_batch(self, available: float) -> int:
        """Return the largest micro-batch that the bound admits; 0 if none."""
        if self.total(1) > available:
            return 0
        return int((available - self.state) / self.per_sample)


def least_memory(run: RunSettings, device: torch.device) -> LeastMemory:
    """Compute the bound of a run on a device from the sizes of its model."""
    clap = run.clap
    preset = clap.preset()
    num_weights = 0
    num_trained = 0
    activation_bytes = 0
    # Models of open_clip can't be built without memory.
    if not preset.open_clip:
        settings = clap.model.model_copy(update={"pretrained_text": False})
        with torch.device("meta"):
            model = build_model(settings, clap.loss, device, clap.train.freeze)
        for parameter in model.parameters():
            num_weights += parameter.numel()
            if parameter.requires_grad:
                num_trained += parameter.numel()
        activation_bytes = least_activations(run, device)

    is_16_bit = run.precision in ("bf16", "fp16")
    weight_bytes = 2 if is_16_bit else 4
    # fp32 master weights.
    bytes_per_trained = 4 if is_16_bit else 0
    if run.deepspeed.get("optimizer", {}).get("type", "").lower() in ADAMS:
        # Two fp32 moments.
        bytes_per_trained += 8
    if clap.train.ema_decay:
        bytes_per_trained += 4

    # The step's batches, and on CPUs those that synthetic data repeats, of 16-bit values.
    num_batches = run.gradient_accumulation_steps if clap.train.accumulation == "gradcache" else 1
    if device.type == "cpu" and isinstance(clap.data, SyntheticData):
        num_batches += clap.data.num_batches
    batch_bytes = num_batches * 2 * math.prod(preset.audio.clip_shape)
    return LeastMemory(
        state=weight_bytes * num_weights + bytes_per_trained * num_trained,
        gradients=weight_bytes * num_trained,
        per_sample=batch_bytes + activation_bytes,
    )


def least_activations(run: RunSettings, device: torch.device) -> int:
    """Return the bytes per sample of the blocks' tensors that exist at once when the backward pass
    begins or, with activation checkpointing, in the backward pass of the largest block.

    Of C channels, a block keeps the input of attention (C), queries, keys and values (3C), the
    mixed values (C), the input of the MLP (C), both normalized inputs (2C), and the MLP's hidden
    units before and after GELU. Compiled, or with Triton, it may recompute normalized inputs and
    GELU, and in the audio tower all hidden units.
    """
    clap = run.clap
    audio = clap.preset().audio
    text = clap.preset().text
    # Elements of each block's input.
    audio_sizes = []
    for depth, grid, dim in zip(audio.depths, audio.stage_grids, audio.stage_dims, strict=True):
        audio_sizes += [grid**2 * dim] * depth
    # Packed captions have at least a start and an end.
    num_tokens = 2 if clap.packs_captions else clap.context_length
    # The last layer may compute only the first token.
    num_layers = text.num_layers - text.ends_with_first_token
    text_sizes = [num_tokens * text.hidden_size] * num_layers
    text_ratio = text.intermediate_size // text.hidden_size

    recomputes = device.type == "cuda" or resolve_compile_mode(clap.compile, device) != "off"
    # Stored elements per element of the input.
    audio_width = 6 if recomputes else 8 + 2 * audio.mlp_ratio
    text_width = 6 + text_ratio if recomputes else 8 + 2 * text_ratio
    at_start = 0
    in_largest = 0
    towers = {"audio": (audio_sizes, audio_width), "text": (text_sizes, text_width)}
    for tower, (sizes, width) in towers.items():
        if tower in clap.train.freeze:
            continue
        # A checkpointed block stores its input only.
        stored_width = 1 if tower in clap.model.activation_checkpointing else width
        at_start += stored_width * sum(sizes)
        in_largest = max(in_largest, width * max(sizes, default=0))
    element_bytes = 4 if run.precision == "fp32" else 2
    return element_bytes * max(at_start, in_largest)


def require_memory(run: RunSettings, ranks: Ranks, device: torch.device) -> None:
    """Raise TooLittleMemoryError on all ranks if a step certainly needs more memory than a GPU, or
    a host's ranks, have.

    Print a warning if a step takes minutes on CPUs. A collective.
    """
    micro_batch = SMALLEST_TRIED if run.clap.bench.find_micro_batch else run.micro_batch
    with raise_on_all_ranks():
        least = least_memory(run, device)
    limits = [(ranks.host, limit) for limit in memory_limits(device)]
    describe = partial(describe_shortage, least, micro_batch, device.type)
    shortage = reduce_on_rank0(limits, describe)
    if shortage:
        raise TooLittleMemoryError(shortage)
    if device.type == "cpu" and ranks.is_main_process and not run.clap.preset().open_clip:
        warn_of_slow_steps(run)


def describe_shortage(
    least: LeastMemory,
    micro_batch: int,
    device_type: str,
    by_rank: list[list[tuple[str, MemoryLimit]]],
) -> str:
    """Return what to print if the limits of all ranks, each with its host, are too low for the
    bound; empty if they aren't."""
    limits = list(chain.from_iterable(by_rank))
    # Ranks with the same limit of a host share it.
    num_sharing = Counter((host, name) for host, (name, _) in limits)
    available, host, name, free = min(
        (free / num_sharing[host, name], host, name, free) for host, (name, free) in limits
    )
    if least.total(micro_batch) <= available:
        return ""

    num_ranks = num_sharing[host, name]
    largest = least.largest_micro_batch(available)
    fitting = f"at most {largest} may fit" if largest else "not even 1 fits"
    return (
        f"micro-batch {micro_batch} needs at least {least.total(micro_batch) / 1e9:.1f} GB per rank,"
        f" {least.per_sample / 1e6:.0f} MB per sample and {least.state / 1e9:.1f} GB of weights and optimizer state, but"
        f" {host} has {free / 1e9:.1f} GB for {count_of(num_ranks, 'rank')}: {name}."
        f" Of micro-batches, {fitting}: {advise_on_memory(device_type)}"
    )


def warn_of_slow_steps(run: RunSettings) -> None:
    """Warn if a step takes minutes on this rank's cores."""
    num_samples = run.micro_batch * run.gradient_accumulation_steps
    forward = forward_flops(run.clap.preset(), TextLengths.fixed(run.clap.context_length), "model")
    # A backward pass is two forward passes.
    step_tflop = 3 * num_samples * forward / 1e12
    num_cores = torch.get_num_threads()
    step_s = step_tflop / (TFLOPS_PER_CORE * num_cores)
    if step_s > SLOW_STEP_S:
        print(
            f"warning: a step of {num_samples:,} samples is {step_tflop:,.0f} TFLOP, about {step_s / 60:,.0f} minutes on"
            f" {num_cores} CPU cores: {advise_on_memory('cpu')}",
            flush=True,
        )
