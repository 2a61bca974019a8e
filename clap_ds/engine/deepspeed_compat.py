"""Every use of DeepSpeed's internals: private attributes, replaced methods, internal modules and
names in its state.

A new version of DeepSpeed is supported here, after `tests/engine/test_deepspeed_compat.py` has
named what is missing. Packages below the engine can't import this file: `distributed/init.py`
prepares DeepSpeed's process group, and `run_records/run_dir.py` its logger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.utils.timer import ThroughputTimer
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from clap_ds.flop_count.counters import replaced_attributes
from clap_ds.metrics.tensorboard import Scalar

__all__ = ["OPTIMIZER_STATE_DICT", "FP16_Optimizer", "FusedAdam", "autocast_if_enabled"]

FLAT_MASTERS = "fp32_groups_flat"
"""In the state of a 16-bit optimizer: one fp32 tensor per group."""
MASTERS = "fp32_groups"
"""In the state of a 16-bit optimizer that isn't flat: a list of fp32 tensors per group."""


class StandInForFusedAdam(FusedAdam):
    """Base of optimizers for which DeepSpeed's 16-bit wrapper keeps groups flat, as it does for its
    own FusedAdam. That one's constructor would compile a CUDA extension."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)

    zero_grad = torch.optim.Optimizer.zero_grad


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside DeepSpeed's 16-bit wrapper, or the optimizer if it has none."""
    return getattr(optimizer, "optimizer", optimizer)


def is_16_bit_wrapper(optimizer: Any) -> bool:
    """Return whether DeepSpeed keeps fp32 copies of 16-bit weights, and clips gradients itself."""
    # Both wrappers, for flat and other optimizers, have it.
    return hasattr(optimizer, "_global_grad_norm")


def has_loss_scale(wrapper: FP16_Optimizer) -> bool:
    """Return whether a wrapper scales the loss: in fp16, but not in bf16."""
    return bool(wrapper.loss_scale_config.use_grad_scaling)


def undo_first_step(wrapper: Any) -> None:
    """Undo the step with zero gradients that a 16-bit wrapper takes on construction: the weight
    decay and the step count."""
    wrapper.optimizer.state.clear()
    wrapper.refresh_fp32_params()


def replace_update(wrapper: FP16_Optimizer, update: Callable[[], bool]) -> None:
    """Replace the wrapper's step for flat groups. `update` returns whether a gradient overflowed."""
    wrapper.step_fused_adam = update


def set_gradient_norm(wrapper: FP16_Optimizer, norm: Tensor) -> None:
    """Set what `DeepSpeedEngine.get_global_grad_norm` returns."""
    wrapper._global_grad_norm = norm


def flat_groups(wrapper: FP16_Optimizer) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield each group's 16-bit parameters and the flat tensor that they are views of."""
    return zip(wrapper.fp16_groups, wrapper.fp16_groups_flat, strict=True)


def parameters_by_group(optimizer: Any) -> list[list[Tensor]]:
    """Return the model's parameters in the groups and order of its optimizer, or of DeepSpeed's
    wrapper around that."""
    if hasattr(optimizer, "fp16_groups"):
        groups: list[list[Tensor]] = optimizer.fp16_groups
        return groups
    return [group["params"] for group in optimizer.param_groups]


def masters_by_group(optimizer: Any) -> list[list[Tensor]]:
    """Return the optimizer's fp32 weights likewise; views, or the model's own parameters."""
    groups = parameters_by_group(optimizer)
    if hasattr(optimizer, FLAT_MASTERS):
        return [
            _unflatten_dense_tensors(flat, parameters)
            for flat, parameters in zip(optimizer.fp32_groups_flat, groups, strict=True)
        ]
    # Neither wrapper: the optimizer steps the model's own fp32 weights.
    masters: list[list[Tensor]] = getattr(optimizer, MASTERS, groups)
    return masters


def disable_fp32_clipping(engine: Any) -> None:
    """Keep DeepSpeed from clipping gradients outside its 16-bit wrappers, which reads the norm on
    the host."""
    engine.clip_fp32_gradients = lambda: None


def enable_allreduce(engine: Any, enabled: bool) -> None:
    """Set whether DeepSpeed averages gradients over ranks after the backward pass."""
    engine.enable_backward_allreduce = enabled


def defer_monitor_events(
    engine: Any, receive: Callable[[list[Scalar]], object], *, enabled: bool
) -> Callable[[list[Scalar]], None]:
    """Pass the events of DeepSpeed's monitors to `receive`, and return the function that writes
    events.

    Args:
        enabled: whether DeepSpeed's engine makes events, even if all of its monitors are disabled.
    """
    write: Callable[[list[Scalar]], None] = engine.monitor.write_events
    engine.monitor.write_events = receive
    engine.monitor.enabled = engine.monitor.enabled or enabled
    return write


@contextmanager
def without_process_group() -> Iterator[None]:
    """Make DeepSpeed forget its process groups in the body, where torch's is another one. There it
    doesn't compile its all-reduce in shared memory either."""
    # They would refer to groups of torch that don't exist in the body.
    groups = deepspeed.utils.groups
    comm = deepspeed.comm.comm
    operations = deepspeed.ops.__compatible_ops__
    world_group, backend, compiled = groups._WORLD_GROUP, comm.cdb, dict(operations)
    groups._WORLD_GROUP = None
    comm.cdb = None
    # Reading it must not compile anything.
    operations["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        groups._WORLD_GROUP = world_group
        comm.cdb = backend
        operations.clear()
        operations.update(compiled)


@contextmanager
def accelerator_with_all_dtypes() -> Iterator[None]:
    """Make DeepSpeed accept every precision in the body. Otherwise it asks this host's processor,
    which may have no fp16."""
    supported: Any = {
        "is_fp16_supported": lambda _: True,
        "is_bf16_supported": lambda _: True,
        "supported_dtypes": lambda _: [torch.float32, torch.float16, torch.bfloat16],
    }
    with replaced_attributes(type(get_accelerator()), **supported):
        yield


class StepToStepTimer(ThroughputTimer):
    """DeepSpeed's throughput timer, running from the end of a step to the end of the next one.

    DeepSpeed's own runs on the host from the launch of the forward pass to the end of `step()`.
    While the host is ahead of the GPU, this isn't a step's time, unless the timer waits for the GPU
    twice in every step. From end to end, times add up to wall time wherever the host waits, waiting
    for data included. Evaluations and checkpoints are excluded by `pause`, and so are steps after it
    while `is_off` is set.
    """

    def __init__(self, timer: ThroughputTimer) -> None:
        """Make a replacement for an engine's timer."""
        super().__init__(timer.config, timer.batch_size, steps_per_output=timer.steps_per_output)
        self.is_off = False
        self._unprinted_s = 0.0
        self._unprinted_steps = 0

    def start(self) -> None:
        """Start the clock unless it is running, when the GPU has finished earlier work. DeepSpeed
        calls this in each forward pass."""
        # The clock runs from step to step; DeepSpeed's `stop` needs `started`.
        if self.start_time > 0:
            self.started = True
        elif self.config.enabled and not self.is_off:
            get_accelerator().synchronize()
            super().start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Count a micro-step, with `global_step` also a step. DeepSpeed calls this at the end of
        `step()`."""
        if not self.started:
            return
        self._count_time()
        if global_step and self.start_time > 0:
            self._unprinted_steps += 1
            # DeepSpeed prints the batch over this time as `CurrSamplesPerSec`. Single steps vary
            # with the host's lead, so it is the mean since the last line.
            self.step_elapsed_time = self._unprinted_s / self._unprinted_steps
        # DeepSpeed adds its own duration, which is zero: `_count_time` has just moved `start_time`.
        super().stop(global_step, report_speed)
        if global_step and self._is_report_boundary():
            self._unprinted_s = 0.0
            self._unprinted_steps = 0

    def pause(self) -> None:
        """Stop the clock until the next `start`. The caller has waited for the GPU, so that all of
        its work counts."""
        self._count_time()
        self.start_time = 0

    def samples_per_s(self) -> float | None:
        """Return the samples/s of all steps but the first `start_step`, which aren't timed; None if
        there are no others."""
        # DeepSpeed's average would divide by zero or less.
        if self.global_step_count <= self.start_step or self.total_elapsed_time == 0:
            return None
        return float(self.avg_samples_per_sec())

    @contextmanager
    def synchronized(self, enabled: bool) -> Iterator[None]:
        """Wait for the GPU whenever the body stops the timer, if `enabled` or the run's
        configuration asks for it."""
        configured = self.config.synchronized
        self.config.synchronized = configured or enabled
        try:
            yield
        finally:
            self.config.synchronized = configured

    def _count_time(self) -> None:
        if self.start_time > 0:
            if self.config.synchronized:
                get_accelerator().synchronize()
            now = time.time()
            self.total_elapsed_time += now - self.start_time
            self._unprinted_s += now - self.start_time
            self.start_time = now  # type: ignore[assignment]  # starts as 0 in DeepSpeed
