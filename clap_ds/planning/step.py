"""One training step of a run as the engine takes it, recorded on fake tensors: model, loss over all ranks, backward, AdamW.

Follows `engine.engine` and what DeepSpeed does at ZeRO stage 0. Memory is that of one rank: weights (with masters and moments
as its precision has them), gradients, the batches on the device and everything that forward and backward keep. Leaves time to
`roofline.py`, and what an allocator and a driver need beyond live tensors to `plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from clap_ds.config.errors import UserError
from clap_ds.config.sections import SyntheticData
from clap_ds.config.settings import RunSettings
from clap_ds.engine import engine
from clap_ds.engine.loss import SoftmaxLoss
from clap_ds.engine.optimizer import OPTIONS, FlatAdamW, FlatStep
from clap_ds.engine.session import build_model
from clap_ds.engine.wrapping import parameter_groups
from clap_ds.model import text
from clap_ds.model.clap import ClapModel
from clap_ds.model.packed import Packing, lay_out, pack
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.trace import Formula, Operation, Recorded, trace

AHEAD = 1
"""Batches on the device beside the one that is worked on, where they come from the host."""


@dataclass(frozen=True)
class Step:
    """A recorded step.

    Attributes:
        recorded: of one micro-batch and one update.
        num_micro_batches: in the step.
        cached: whether accumulation is `cached`: one loss a step, and another forward pass.
        num_parameters: trained ones.
    """

    recorded: Recorded
    micro_batch: int
    num_micro_batches: int
    cached: bool
    num_parameters: int

    @property
    def num_samples(self) -> int:
        """Of one rank."""
        return self.micro_batch * self.num_micro_batches

    def times(self, operation: Operation) -> int:
        """How often the step does an operation."""
        once = operation.part in ("gradients", "optimizer") or (self.cached and operation.part == "loss")
        return 1 if once else self.num_micro_batches


def check_plannable(run: RunSettings) -> None:
    """Raises UserError for settings whose memory and time aren't known here."""
    if stage := run.deepspeed.get("zero_optimization", {}).get("stage", 0):
        raise UserError(f"{run.path}: zero_optimization.stage: plans are made for stage 0, found {stage}")
    kind = run.deepspeed.get("optimizer", {}).get("type", "")
    if kind.lower() not in ("adam", "adamw"):
        raise UserError(f"{run.path}: optimizer.type: plans are made for AdamW, found {kind!r}")


def with_model_settings(run: RunSettings, **changes: Any) -> RunSettings:
    """The run with fields of `clap.model` replaced."""
    model = run.clap.model.model_copy(update=changes)
    return RunSettings(run.path, run.clap.model_copy(update={"model": model}), run.deepspeed)


def caption_lengths(run: RunSettings, num_captions: int) -> list[int]:
    """Real tokens of a batch's captions: synthetic ones' as many of each length as the run's histogram expects; others are
    taken to be full."""
    longest = run.clap.text_tokens
    setting = run.clap.data.caption_lengths if isinstance(run.clap.data, SyntheticData) else None
    if not isinstance(setting, dict):
        return [setting or longest] * num_captions
    lengths: list[int] = []
    total, passed = sum(setting.values()), 0.0
    for length, weight in sorted(setting.items(), key=lambda item: int(item[0])):
        passed += weight / total
        lengths += [int(length)] * (round(passed * num_captions) - len(lengths))
    return lengths


def trace_step(
    run: RunSettings, micro_batch: int, *, world_size: int = 1, cuda: bool = True, front_end: bool = True
) -> Step:
    """Record a step.

    Args:
        run: checked by `check_plannable`. Of `cached` accumulation the first forward passes, which keep nothing, are recorded
            as one.
        micro_batch: in place of the run's.
        world_size: ranks.
        cuda: as on a GPU; else as a CPU does it by torch's operations.
        front_end: batches hold waveforms; else log-mel features, as of mel shards.
    """
    run = with_model_settings(run, text_from_hub=False)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        model = _fake_model(run, fakes, torch.device("cuda" if cuda else "cpu"))
        inputs, formulas = _inputs(run, micro_batch, fakes, stack, front_end)
        with fakes:
            optimizer = _Optimizer(run, model)
        stack.enter_context(_rank_of(world_size))
        if cuda:
            stack.enter_context(like_cuda())
        stack.enter_context(fakes)
        parts = {"audio": [model.mel, model.audio, model.audio_projection], "text": [model.text, model.text_projection]}
        recorded = stack.enter_context(trace(parts, formulas))
        recorded.hold([*model.parameters(), *model.buffers()], "weights")
        recorded.hold(optimizer.state(), "optimizer state")
        resident = _resident_batches(run) if cuda else 1
        batches = [[torch.empty_like(each) for each in inputs if isinstance(each, Tensor)] for _ in range(resident - 1)]
        if cuda and (not front_end or getattr(run.clap.data, "waveforms", None) == "int16"):
            batches.append([torch.empty_like(inputs[0], dtype=torch.int16)])  # or float16: as it comes from the host
        recorded.hold([t for batch in [*batches, inputs] for t in batch if isinstance(t, Tensor)], "batches")
        kept = _note_gradients(model, recorded, from_the_start=world_size > 1 or run.gradient_accumulation_steps > 1)
        _micro_step(run, model, inputs, recorded)
        if world_size == 1 or run.clap.gradient_sync == "deepspeed":
            with recorded.part("gradients"):
                _average_by_deepspeed(model)
        with recorded.part("optimizer"):
            optimizer.step()
        del kept
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    cached = run.clap.train.accumulation == "cached"
    return Step(recorded, micro_batch, run.gradient_accumulation_steps, cached, trained)


def trace_loss(run: RunSettings, micro_batch: int, world_size: int) -> Recorded:
    """Record the loss alone, forward and backward, as it is with so many ranks."""
    size, joint_dim = micro_batch, run.clap.preset().joint_dim
    if run.clap.train.accumulation == "cached":
        size *= run.gradient_accumulation_steps
    sigmoid = run.clap.loss.kind == "sigmoid"
    captions = run.clap.loss.same_caption == "positive"
    with _rank_of(world_size), like_cuda(), FakeTensorMode(), trace() as recorded:
        features = [torch.empty(size, joint_dim, requires_grad=True) for _ in range(2)]
        scalars = [torch.empty(1, requires_grad=True) for _ in range(1 + sigmoid)]
        hashes = torch.empty(size, dtype=torch.long) if captions else None
        with recorded.part("loss"):
            engine.build_loss(run)(*features, *scalars, captions_B=hashes).backward()
    return recorded


@contextmanager
def _rank_of(world_size: int) -> Iterator[None]:
    """A group of that many ranks, of which there is one and nothing is sent."""
    if world_size == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fake_model(run: RunSettings, fakes: FakeTensorMode, device: torch.device) -> ClapModel:
    with torch.device("meta"):
        model = build_model(run, device).train()
    for tower in run.clap.train.freeze:
        model.get_submodule(tower).requires_grad_(False)
        model.get_submodule(f"{tower}_projection").requires_grad_(False)
    kept = {id(parameter) for parameter in model.fp32_parameters()}
    for parameter in model.parameters():  # as DeepSpeed casts: buffers stay
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(_parameter_dtype(run))
    with fakes:
        return model.to_empty(device="cpu")


def _parameter_dtype(run: RunSettings) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision, torch.float32)


def _autocast(run: RunSettings) -> Any:
    name = run.precision.removeprefix("torch_autocast_")
    return nullcontext() if name == run.precision else torch.autocast("cpu", getattr(torch, name))


def _inputs(
    run: RunSettings, micro_batch: int, fakes: FakeTensorMode, stack: ExitStack, front_end: bool
) -> tuple[tuple[Any, ...], dict[str, Formula]]:
    """What the model's forward takes (`Batch.model_inputs`), and FLOPs that depend on how long captions are."""
    config, longest = run.clap.preset(), run.clap.text_tokens
    lengths = caption_lengths(run, micro_batch)
    with fakes:
        shape = (config.audio.num_samples,) if front_end else config.audio.feature_shape
        audio = torch.empty(micro_batch, *shape)
        ids, mask = (torch.empty(micro_batch, longest, dtype=torch.long) for _ in range(2))
    if run.clap.text == "padded":
        return (audio, ids, None if min(lengths) == longest else mask), {}
    real_mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    row, packing = pack([(torch.ones_like(real_mask), real_mask)])
    # The engine's own depends on values.
    layout = tree_map_only(Tensor, fakes.from_tensor, lay_out(packing, len(row)))
    stack.enter_context(mock.patch.object(text, "lay_out", return_value=layout))
    products = 4 * config.text.hidden_size * sum(length**2 for length in packing.bounds.diff().tolist())
    formulas: dict[str, Formula] = {
        "torch_attn._varlen_attn": lambda *_, **__: products,
        "torch_attn._varlen_attn_backward": lambda *_, **__: 2.5 * products,
    }
    packing = Packing(fakes.from_tensor(packing.bounds), packing.num_captions, packing.max_tokens)
    return (audio, fakes.from_tensor(row), None, packing), formulas


def _resident_batches(run: RunSettings) -> int:
    data = run.clap.data
    if isinstance(data, SyntheticData) and data.placement == "device":
        return data.num_batches
    cached = run.clap.train.accumulation == "cached"
    return AHEAD + (run.gradient_accumulation_steps if cached else 1)


def _note_gradients(model: nn.Module, recorded: Recorded, *, from_the_start: bool) -> list[Any]:
    """Have gradients count as such; from the start those that the reducer's buckets or earlier micro-batches keep."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if from_the_start:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    recorded.hold([parameter.grad for parameter in trained if parameter.grad is not None], "gradients")

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorded.hold([parameter.grad], "gradients")

    return [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]


def _micro_step(run: RunSettings, model: ClapModel, inputs: tuple[Any, ...], recorded: Recorded) -> None:
    """Forward, loss and backward of one micro-batch, as `ClapEngine.forward_backward` or, cached, `FeatureCache`."""
    loss = engine.build_loss(run)
    cached = run.clap.train.accumulation == "cached"
    if isinstance(loss, SoftmaxLoss) and not cached:
        loss.gather_early(model)
    same = run.clap.loss.same_caption == "positive"

    def value(*features: Tensor) -> Tensor:
        with recorded.part("loss"):
            captions = torch.empty(len(features[0]), dtype=torch.long) if same else None
            return loss(*features, captions_B=captions)

    def forward() -> tuple[Tensor, ...]:
        with _autocast(run):
            return model(*inputs)

    if not cached:
        value(*forward()).backward()
        return
    with torch.no_grad():
        audio, text_features, *scalars = forward()
    number = run.gradient_accumulation_steps
    features = [each.repeat(number, 1).requires_grad_() for each in (audio, text_features)]
    leaves = [*features, *(scalar.detach().requires_grad_() for scalar in scalars)]
    gradients = torch.autograd.grad(value(*leaves), leaves)
    outputs = forward()
    terms = [(out * gradient[: len(out)]).sum() for out, gradient in zip(outputs, gradients, strict=True)]
    torch.stack(terms).sum().backward()


@torch.no_grad()
def _average_by_deepspeed(model: nn.Module) -> None:
    """DeepSpeed's `buffered_allreduce_fallback`, which one rank goes through, too: all gradients of a dtype in a flat copy."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for dtype in {gradient.dtype for gradient in gradients}:
        bucket = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        flat.mul_(1.0)
        for gradient, averaged in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


class _Optimizer:
    """`FlatAdamW`, in bf16 with the step over DeepSpeed's flat buffers, state and all."""

    def __init__(self, run: RunSettings, model: ClapModel) -> None:
        options: Mapping[str, Any] = run.deepspeed["optimizer"].get("params", {})
        options = {name: value for name, value in options.items() if name in OPTIONS}
        with torch.no_grad():
            groups = list(parameter_groups(model))
            self._groups = [group["params"] for group in groups]
            self._low: list[Tensor] = []
            if run.precision in ("bf16", "fp16"):  # the weights are views of these
                self._low = [torch.cat([p.flatten() for p in params]) for params in self._groups]
                groups = [{"params": [nn.Parameter(low.float())]} for low in self._low]
            self._adam = FlatAdamW(groups, cpu_kernels=False, **options)
            own = SimpleNamespace(fp16_groups=self._groups, fp16_groups_flat=self._low, fp32_groups_flat=self._low)
            own.optimizer = self._adam
            # DeepSpeed's defaults, which differ by precision
            self._clipping = own.clip_grad = float(run.deepspeed.get("gradient_clipping", 1.0 if self._low else 0.0))
            self._flat_step = FlatStep(own) if self._low else None
            for parameter in self._trained():
                parameter.grad = torch.empty_like(parameter)
            self.step()  # makes its state

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for params in self._groups for parameter in params]

    def state(self) -> list[Tensor]:
        """Masters and moments."""
        own = [p for group in self._adam.param_groups for p in group["params"]] if self._low else []
        return [*own, *(value for state in self._adam.state.values() for value in state.values())]

    @torch.no_grad()
    def step(self) -> None:
        if self._flat_step is not None:
            self._flat_step()
        else:
            if self._clipping > 0:
                torch.nn.utils.clip_grad_norm_(self._trained(), self._clipping)
            self._adam.step()
        for parameter in self._trained():
            parameter.grad = None
