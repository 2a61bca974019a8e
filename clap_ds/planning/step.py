"""Record a rank's training step with the run's engine on fake tensors: model, loss over all ranks,
backward, AdamW.

It is the second step, when the optimizer has its state and torch's reducer its buckets.

Compute a rank's peak memory by part, and the largest micro-batch that fits on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from clap_ds.config.batch_sizes import MICRO_BATCH
from clap_ds.config.settings import RunSettings
from clap_ds.data.batch import Batch
from clap_ds.engine.compile import resolve_compile_mode
from clap_ds.engine.deepspeed_compat import without_process_group
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import ADAMS, build_model
from clap_ds.engine.loss import build_loss
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.inductor import fused_kernels
from clap_ds.planning.tracing import TOWERS, Operation, Recorded
from clap_ds.utils.errors import UserError

CUDA = torch.device("cuda")
SECTIONS = ("bf16", "fp16", "torch_autocast", "gradient_clipping", "communication_data_type")
"""DeepSpeed's sections that affect a step's computation and memory."""
PARTS = {"data_wait": "batches", "forward": "gradients", "backward": "gradients"}
"""Phase of the engine's step → part of its operations outside the towers and autograd, unless of
the same name."""


@dataclass(frozen=True)
class Step:
    """Hold a recorded step."""

    recorded: Recorded
    num_samples: int  # per rank
    repeats: float  # of the recorded micro-batches in a step
    passes: tuple[int, int]  # of a step, forward and backward
    num_parameters: int  # trained ones

    def work(self, kernels: Iterable[Operation] = ()) -> list[tuple[Operation, float]]:
        """Return the operations that launch kernels with their repetitions per step. `kernels`: a
          pass's fused kernels, if
        towers are compiled."""
        fused = [(each, float(self.passes[each.backward])) for each in kernels]
        own = [each for each in self.recorded.operations if each.bytes_moved]
        if (
            fused
        ):  # Inductor's kernels are those of the towers' element-wise operations and reductions
            own = [
                each
                for each in own
                if each.part not in TOWERS or each.flops or not each.name.startswith("aten.")
            ]
        return [
            (each, 1 if each.part in ("gradients", "optimizer") else self.repeats) for each in own
        ] + fused


@contextmanager
def fake_rank(world_size: int) -> Iterator[None]:
    """Fake a process group, and make `ClapEngine` accept fake tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with (
            without_process_group(),
            mock.patch.dict(os.environ, LOCAL_RANK="0"),
            # Modules change dtype with it, but it fails if anything refers to a parameter.
            mock.patch.object(
                torch.utils, "swap_tensors", lambda own, new: setattr(own, "data", new.data)
            ),
        ):
            yield
    finally:
        dist.destroy_process_group()


def trace_step(
    run: RunSettings, micro_batch: int, world_size: int = 1, *, cuda: bool = True
) -> Step:
    """Record a step of a run with this micro-batch on one of `world_size` ranks, with CUDA's or the
    CPU's torch operations. Raises UserError for an optimizer other than AdamW."""
    number = run.gradient_accumulation_steps
    cached = run.clap.train.accumulation == "gradcache"
    num_traced = number if cached else min(number, 2)  # later ones are like the second
    run, model = _simplified(run, micro_batch, CUDA if cuda else torch.device("cpu"))
    compiled = resolve_compile_mode(run.clap.compile, CUDA) != "off"
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        model.to_empty(device="cpu")
    with fakes, fake_rank(world_size):
        engine = ClapEngine(
            model, build_loss(run.clap.loss, run.precision), run.deepspeed, run.clap, run.clap.train
        )
        batches = _batches(run)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        audio = [model.mel, model.audio, model.audio_projection]
        text = [model.text, model.text_projection]
        with (
            Recorded(audio=audio, text=text) as recorded,
            like_cuda(compiled=compiled) if cuda else nullcontext(),
        ):
            engine.timer = cast("Any", lambda phase: recorded.part(PARTS.get(phase, phase)))
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(
                    lambda each: recorded.hold(each.grad, "gradients")
                )
            with engine.sync.off():  # nothing is sent
                engine.step(batches)
                optimizer: Any = engine.deepspeed.optimizer
                moments = getattr(optimizer, "optimizer", optimizer).state
                average = engine.average
                recorded.hold(
                    [engine.masters, moments, average and average.weights], "optimizer state"
                )
                recorded.hold([*model.parameters(), *model.buffers()], "weights")
                # Torch's reducer keeps its buckets. A compiled graph returns its gradients
                # together, beside them.
                buckets = [torch.empty_like(each) for each in trained * (world_size > 1)]
                recorded.hold(buckets, "gradients")
                recorded.restart()
                engine.set_accumulation_steps(num_traced)
                engine.step(batches)
    num_parameters = sum(each.numel() for each in trained)
    return Step(
        recorded,
        micro_batch * number,
        number / num_traced,
        (number * (1 + cached), number),
        num_parameters,
    )


def compiled_kernels(run: RunSettings, micro_batch: int) -> list[Operation]:
    """Return Inductor's own kernels, on a GPU, of one forward and backward pass of the mel front
    end and both towers."""
    run, model = _simplified(run, micro_batch, CUDA)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision, torch.float32)
    model.train().to(dtype).to_empty(device="cpu")  # of preserve_rng_and_bn memory
    audio, *text = next(_batches(run)).model_inputs()
    inputs: dict[str, list[Any]] = {"audio": [audio], "text": text}
    if audio.ndim == 2:
        inputs |= {
            "mel": [audio],
            "audio": [torch.empty(micro_batch, *model.config.audio.feature_shape)],
        }
    with torch.autocast("cpu", torch.bfloat16, enabled=run.precision.startswith("torch_autocast")):
        return [
            Operation("fused", "text" if name == "text" else "audio", backward, 0, num_bytes)
            for name, tensors in inputs.items()
            for backward, num_bytes in fused_kernels(model.get_submodule(name), *tensors)
        ]


def _simplified(
    run: RunSettings, micro_batch: int, device: torch.device
) -> tuple[RunSettings, Any]:
    """Return the run for the engine, and its model for a device, on the meta device. The run has
    torch's operations and AdamW, one micro-batch, no monitors, and captions padded to their mean
    length instead of packed."""
    if run.clap.preset().open_clip:
        raise UserError(f"{run.path}: clap.model.preset: plans support only this project's models")
    optimizer = run.deepspeed.get("optimizer", {"type": ""})
    if optimizer["type"].lower() not in ADAMS:
        raise UserError(
            f"{run.path}: optimizer.type: plans support only AdamW, found {optimizer['type']!r}"
        )
    clap = run.clap
    lengths = getattr(run.clap.data, "caption_lengths", None)
    own: Any = {
        "cpu_kernels": "off",
        "optimizer_implementation": "torch",
        "gradient_sync": "deepspeed",
    }
    if clap.text_packing and lengths:
        shares = lengths if isinstance(lengths, dict) else {lengths: 1}
        own["context_length"] = round(
            sum(int(each) * share for each, share in shares.items()) / sum(shares.values())
        )
        own["data"] = clap.data.model_copy(update={"caption_lengths": None})
    own["model"] = clap.model.model_copy(update={"pretrained_text": False})
    config = {name: run.deepspeed[name] for name in SECTIONS if name in run.deepspeed}
    config |= {MICRO_BATCH: micro_batch, "optimizer": {"type": "AdamW"}, "log_level": "error"}
    run = RunSettings(run.path, clap.model_copy(update=own), config)
    with torch.device("meta"):
        return run, build_model(run.clap.model, run.clap.loss, device, run.clap.train.freeze)


def _batches(run: RunSettings) -> Iterator[Batch]:
    """Yield batches like `BatchSource`. The next one is in memory, too."""
    audio = run.clap.preset().audio
    size = run.micro_batch
    length = run.clap.context_length
    is_int16 = getattr(run.clap.data, "audio_dtype", "int16") == "int16" and not audio.fusion
    num_tokens = (
        0 if getattr(run.clap.data, "caption_lengths", None) else size * length
    )  # full ones need no mask

    ahead = None
    while True:
        ids, mask = (torch.empty(size, length, dtype=torch.long) for _ in range(2))
        clips = torch.empty(
            size, *audio.clip_shape, dtype=torch.int16 if is_int16 else torch.float32
        )
        batch = ahead
        ahead = Batch(clips, ids, mask, num_tokens)
        if batch is not None:
            yield batch
        del batch


GIB = 2**30
CONTEXT_GIB = 0.7
"""CUDA context, kernels and cuBLAS workspace: 0.5 to 0.8 on H100 (assumed)."""
NCCL_GIB = 0.8  # channel buffers if there is more than one rank (assumed)
FRAGMENTATION = 0.016
"""Fraction of live memory that PyTorch's allocator holds in addition: 0.3% to 1.6% on an H200
(`results/h200`)."""
LEAP = 4
MOST_TRIES = 8


def memory_parts(step: Step, world_size: int) -> dict[str, float]:
    """Return GiB by part at the peak, largest first; their sum is the peak."""
    names = {"audio": "audio activations", "text": "text activations"}
    found = {
        names.get(part, part): num_bytes / GIB for part, num_bytes in step.recorded.at_peak.items()
    }
    found["fragmentation"] = FRAGMENTATION * sum(found.values())
    found["context and libraries (assumed)"] = CONTEXT_GIB + NCCL_GIB * (world_size > 1)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def largest_micro_batch(
    peak_gib: Callable[[int], float], start: int, limit_gib: float
) -> int | None:
    """Return the largest multiple of 8 whose peak is within the limit; None if 8 is too large.

    Extrapolate linearly from the last two sizes, because each peak requires recording a step; from
    the first as if half of it were constant. Small batches may need less memory than the weight
    update, which has a constant size.
    """
    peaks = dict[int, float]()
    last = 0
    size = start
    while size not in peaks and len(peaks) < MOST_TRIES:
        peaks[size] = peak_gib(size)
        slope = (peaks[size] - peaks.get(last, peaks[size] / 2)) / (size - last)
        wanted = size + (limit_gib - peaks[size]) / slope if slope > 0 else LEAP * max(size, last)
        last = size
        size = max(int(wanted) // 8, 1) * 8
    return (
        max((size // 8 * 8 for size, peak in peaks.items() if peak <= limit_gib), default=0) or None
    )
