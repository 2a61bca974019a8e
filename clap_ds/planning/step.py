"""Record a rank's training step with the run's engine on fake tensors: model, loss over all ranks,
backward, AdamW.

It is the second step, when the optimizer has its state and torch's reducer its buckets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from clap_ds.config.batch_sizes import MICRO_BATCH
from clap_ds.config.schema import EngineSettings
from clap_ds.config.settings import RunSettings
from clap_ds.data.batch import Batch
from clap_ds.engine.compile import resolve_compile_mode
from clap_ds.engine.deepspeed_compat import (
    accelerator_with_all_dtypes,
    inner_optimizer,
    without_process_group,
)
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import ADAMS, build_model
from clap_ds.engine.loss import build_loss
from clap_ds.flop_count.counters import replaced_attributes
from clap_ds.model.htsat import NUM_EARLY_STAGES
from clap_ds.planning.cuda_operations import cuda_semantics
from clap_ds.planning.inductor import fused_kernels
from clap_ds.planning.tracing import TOWERS, Operation, TraceRecorder
from clap_ds.utils.errors import UserError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# DeepSpeed's sections that affect a step's computation and memory.
SECTIONS = ("bf16", "fp16", "torch_autocast", "gradient_clipping", "communication_data_type")
# Phase of the engine's step → part of its operations outside the towers and autograd, unless of the
# same name.
PARTS = {"data_wait": "batches", "forward": "gradients", "backward": "gradients"}


@dataclass(frozen=True)
class Step:
    """A recorded step of one rank."""

    recorder: TraceRecorder
    num_samples: int  # of the rank
    repeats: float  # of the recorded micro-batches in a step
    num_forward: int  # passes of a step
    num_backward: int
    num_parameters: int  # trained ones
    gradient_bytes: int
    last_gradient_bytes: int  # those that are complete only at the end of the backward pass
    feature_bytes: int  # a micro-batch's features of one tower
    num_gathers: int  # of so many bytes per tower and step

    def work(self, kernels: Iterable[Operation] = ()) -> list[tuple[Operation, float]]:
        """Return the operations that launch kernels with their repetitions per step.

        `kernels` are a pass's fused kernels, if towers are compiled.
        """
        work: list[tuple[Operation, float]] = []
        fused = [*kernels]
        for operation in self.recorder.operations:
            if not operation.bytes_moved or (fused and _is_fused(operation)):
                continue
            is_once = operation.part in ("gradients", "optimizer")
            work.append((operation, 1 if is_once else self.repeats))
        for kernel in fused:
            num_passes = self.num_backward if kernel.backward else self.num_forward
            work.append((kernel, float(num_passes)))
        return work


def _is_fused(operation: Operation) -> bool:
    """Return whether Inductor's kernels include it: a tower's element-wise operation or
    reduction."""
    is_product = operation.flops > 0
    is_torch = operation.name.startswith("aten.")
    return operation.part in TOWERS and is_torch and not is_product


@contextmanager
def fake_rank(world_size: int) -> Iterator[None]:
    """Fake a process group, and make `ClapEngine` accept fake tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    local_rank = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    try:
        # Modules change dtype with `swap_tensors`, but it fails if anything refers to a parameter.
        with (
            without_process_group(),
            # `resolve_for_gpu` has asked the planned GPU.
            accelerator_with_all_dtypes(),
            replaced_attributes(torch.utils, swap_tensors=_replace_content),
        ):
            yield
    finally:
        dist.destroy_process_group()
        del os.environ["LOCAL_RANK"]
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def _replace_content(tensor: Tensor, replacement: Tensor) -> None:
    tensor.data = replacement.data


def trace_step(
    run: RunSettings,
    micro_batch: int,
    world_size: int = 1,
    *,
    cuda: bool = True,
    has_flash: bool = True,
) -> Step:
    """Record a step of a run with this micro-batch on one of `world_size` ranks, with CUDA's
    (`has_flash`: flash attention, too) or the CPU's torch operations.

    Raises UserError for an optimizer other than AdamW.
    """
    num_micro_batches = run.gradient_accumulation_steps
    uses_gradcache = run.clap.train.accumulation == "gradcache"
    # GradCache needs all of them at once. Otherwise, later ones are like the second.
    num_traced = num_micro_batches if uses_gradcache else min(num_micro_batches, 2)
    is_compiled = resolve_compile_mode(run.clap.compile, CUDA) != "off"
    sync_settings = run.clap
    run, model = _simplify(run, micro_batch, CUDA if cuda else CPU)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        model.to_empty(device="cpu")
    with fake_mode, fake_rank(world_size):
        loss = build_loss(run.clap.loss, run.precision)
        engine = ClapEngine(model, loss, run.deepspeed, run.clap, run.clap.train)
        recorder = TraceRecorder(
            audio=[model.mel, model.audio, model.audio_projection],
            text=[model.text, model.text_projection],
        )
        operations: Any = nullcontext()
        if cuda:
            operations = cuda_semantics(compiled=is_compiled, has_flash=has_flash)
        with recorder, operations:
            _record_second_step(engine, recorder, _batches(run), num_traced)
    trained = _trained(model)
    # GradCache computes features without gradients first.
    num_forward = 2 * num_micro_batches if uses_gradcache else num_micro_batches
    return Step(
        recorder,
        num_samples=micro_batch * num_micro_batches,
        repeats=num_micro_batches / num_traced,
        num_forward=num_forward,
        num_backward=num_micro_batches,
        num_parameters=sum(parameter.numel() for parameter in trained),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        last_gradient_bytes=_last_gradient_bytes(sync_settings, model, is_compiled=is_compiled),
        feature_bytes=micro_batch * model.config.joint_dim * loss.wire_dtype.itemsize,
        num_gathers=num_micro_batches,
    )


def _last_gradient_bytes(settings: EngineSettings, model: Any, *, is_compiled: bool) -> int:
    """Return the bytes of gradients that can't be sent during the backward pass."""
    num_bytes = sum(parameter.nbytes for parameter in _trained(model))
    # A frozen audio tower has no backward pass that could hide the text tower's gradients.
    if settings.gradient_sync != "overlap" or not _trained(model.audio):
        return num_bytes
    if not is_compiled:
        return min(num_bytes, round(settings.bucket_cap_mb * 2**20))
    # The graph of early stages returns its gradients together.
    late_stages = nn.ModuleList([*model.audio.stages[NUM_EARLY_STAGES:], model.audio.norm])
    late = {*late_stages.parameters()}
    audio = [parameter for parameter in _trained(model.audio) if parameter not in late]
    return sum(parameter.nbytes for parameter in audio)


def _record_second_step(
    engine: ClapEngine, recorder: TraceRecorder, batches: Iterator[Batch], num_micro_batches: int
) -> None:
    """Run two steps of an engine, and keep the record of the second."""
    model = engine.model
    trained = _trained(model)
    engine.timer = cast("Any", lambda phase: recorder.part(str(PARTS.get(phase, phase))))
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: recorder.track(parameter.grad, "gradients")
        )
    # Nothing is sent.
    with engine.sync.off():
        engine.step(batches)
        moments = inner_optimizer(engine.deepspeed.optimizer).state
        average = engine.ema.weights if engine.ema else None
        recorder.track([engine.masters, moments, average], "optimizer state")
        recorder.track([*model.parameters(), *model.buffers()], "weights")
        if dist.get_world_size() > 1:
            # Torch's reducer keeps its buckets. A compiled graph returns its gradients together,
            # beside them.
            buckets = [torch.empty_like(parameter) for parameter in trained]
            recorder.track(buckets, "gradients")
        recorder.reset()
        engine.set_accumulation_steps(num_micro_batches)
        engine.step(batches)


def _trained(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def compiled_kernels(run: RunSettings, micro_batch: int) -> list[Operation]:
    """Return Inductor's own kernels, on a GPU, of one forward and backward pass of the mel front
    end and both towers."""
    run, model = _simplify(run, micro_batch, CUDA)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision, torch.float32)
    model.train().to(dtype).to_empty(device="cpu")  # without memory
    audio, *text = next(_batches(run)).model_inputs()
    # The arguments of each submodule.
    inputs: dict[str, list[Any]] = {"audio": [audio], "text": text}
    is_waveform = audio.ndim == 2
    if is_waveform:
        features = torch.empty(micro_batch, *model.config.audio.feature_shape)
        inputs |= {"mel": [audio], "audio": [features]}
    kernels = []
    uses_autocast = run.precision.startswith("torch_autocast")
    with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
        for name, tensors in inputs.items():
            part = "text" if name == "text" else "audio"
            for is_backward, num_bytes in fused_kernels(model.get_submodule(name), *tensors):
                kernels.append(Operation("fused", part, is_backward, 0, num_bytes))
    return kernels


def _simplify(run: RunSettings, micro_batch: int, device: torch.device) -> tuple[RunSettings, Any]:
    """Return the run for the engine, and its model for a device, on the meta device.

    The run has torch's operations and AdamW, one micro-batch, no monitors, and captions padded to
    their mean length instead of packed.
    """
    clap = run.clap
    if clap.preset().open_clip:
        raise UserError(f"{run.path}: clap.model.preset: plans support only this project's models")
    optimizer = run.deepspeed.get("optimizer", {"type": ""})
    if optimizer["type"].lower() not in ADAMS:
        raise UserError(
            f"{run.path}: optimizer.type: plans support only AdamW, found {optimizer['type']!r}"
        )
    changes: dict[str, Any] = {
        "cpu_kernels": "off",
        "optimizer_implementation": "torch",
        "gradient_sync": "deepspeed",
        "model": clap.model.model_copy(update={"pretrained_text": False}),
    }
    lengths = getattr(clap.data, "caption_lengths", None)
    if clap.packs_captions and lengths:
        changes["context_length"] = _mean_length(lengths)
        changes["data"] = clap.data.model_copy(update={"caption_lengths": None})
    config = {name: run.deepspeed[name] for name in SECTIONS if name in run.deepspeed}
    config |= {MICRO_BATCH: micro_batch, "optimizer": {"type": "AdamW"}, "log_level": "error"}
    run = RunSettings(run.path, clap.model_copy(update=changes), config)
    with torch.device("meta"):
        return run, build_model(run.clap.model, run.clap.loss, device, run.clap.train.freeze)


def _mean_length(lengths: int | dict[str, float]) -> int:
    """Return the mean of synthetic captions' lengths: of one, or of some with their shares."""
    if not isinstance(lengths, dict):
        return lengths
    total = sum(int(length) * share for length, share in lengths.items())
    return round(total / sum(lengths.values()))


def _batches(run: RunSettings) -> Iterator[Batch]:
    """Yield batches like `BatchSource`. The next one is in memory, too."""
    audio = run.clap.preset().audio
    size = run.micro_batch
    length = run.clap.context_length
    is_int16 = getattr(run.clap.data, "audio_dtype", "int16") == "int16" and not audio.fusion
    dtype = torch.int16 if is_int16 else torch.float32
    # Captions without padding need no mask.
    has_padding = bool(getattr(run.clap.data, "caption_lengths", None))
    num_tokens = 0 if has_padding else size * length

    next_batch = None
    while True:
        input_ids = torch.empty(size, length, dtype=torch.long)
        mask = torch.empty(size, length, dtype=torch.long)
        clips = torch.empty(size, *audio.clip_shape, dtype=dtype)
        batch = next_batch
        next_batch = Batch(clips, input_ids, mask, num_tokens)
        if batch is not None:
            yield batch
        del batch
