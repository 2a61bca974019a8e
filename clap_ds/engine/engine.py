"""Train a CLAP model with a DeepSpeed engine, bounding the logit scale and detecting losses that
aren't finite.

After a run's first step with `FlatStep`, the host doesn't read from the device until losses are
checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.config.schema import EngineSettings, ModelSettings, TrainSettings
from clap_ds.cpu_kernels.patch_model import patch_model
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed import error_file
from clap_ds.distributed.collectives import reduce_on_rank0
from clap_ds.distributed.watchdog import watch
from clap_ds.engine.compile import compile_towers, resolve_compile_mode, set_compile_cache
from clap_ds.engine.factory import wrap
from clap_ds.engine.grad_cache import first_pass, second_pass
from clap_ds.engine.gradient_sync import GradientSync
from clap_ds.engine.kernel_fallback import replace_failing_kernels
from clap_ds.engine.optimizer import FlatStep, WeightAverage, master_weights
from clap_ds.metrics.timers import StepTimer, StepTimes
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.run_records.run_dir import quiet_deepspeed
from clap_ds.run_records.schema import Summary

NEVER = torch.iinfo(torch.long).max
MOST_SKIPPED = 40
"""Consecutive skipped steps that end a run. fp16's loss scale starts at 2^16 and may need to be
halved that often."""


class NonFiniteError(RuntimeError):
    """The loss, its gradient or the weights became NaN or infinite; raised on all ranks."""

    fault = error_file.ALL_RANKS


class ClapEngine:
    """Hold a CLAP model wrapped with DeepSpeed and step through batches.

    Attributes:
        deepspeed, config: DeepSpeed's engine around the model, and its configuration.
        masters: the optimizer's fp32 weights by name, in its order; they may be the model's own.
        timer: times phases of steps.
        cached: whether gradients are accumulated with GradCache.
        average: moving average of the weights with `clap.train.ema_decay`; every step updates it,
          including skipped ones.
        steps: number of optimizer steps, including skipped ones.
        is_skipped: whether the last step was skipped because a 16-bit gradient wasn't finite;
          scalar bool on the device.
        skipped_in_a_row: number of consecutive skipped steps up to the last `count_skipped`.
        before_update: if set, called in every step with the averaged gradients in the parameters.
        norm_wanted: compute `gradient_norm` in every step.
        gradient_norm: 2-norm of the last step's averaged gradients before clipping, scalar fp32 on
          the device.
    """

    def __init__(
        self,
        model: ContrastiveModel,
        loss: Any,
        deepspeed: dict[str, Any],
        settings: EngineSettings = EngineSettings(),
        train: TrainSettings = TrainSettings(),
        timer: StepTimer | None = None,
    ) -> None:
        """Wrap a model on its device, with a loss of `build_loss` and DeepSpeed's configuration.
          `build_model` has applied
        `train.freeze`. A collective; raises ValueError if DeepSpeed rejects its sections."""
        self.device = model.logit_scale.device
        self.model = model
        self.loss = loss
        self.config = deepspeed
        self.timer = timer or StepTimer(self.device)
        if self.device.type == "cpu" and settings.cpu_kernels == "auto":
            patch_model(model)
        self.cached = train.accumulation == "gradcache"
        if hasattr(loss, "gather_early") and not self.cached:
            loss.gather_early(model)
        with quiet_deepspeed():
            self.deepspeed = wrap(model, deepspeed, settings, train)
        optimizer = self.deepspeed.optimizer
        decay = train.ema_decay
        self._flat_step = FlatStep(optimizer) if FlatStep.has_place_for(optimizer) else None
        self.masters = master_weights(model, optimizer)
        self.average = WeightAverage(model, self.masters, decay) if decay else None
        self.deepspeed.clip_fp32_gradients = lambda: None  # `_update` has
        self.sync = GradientSync(
            self.deepspeed,
            overlapped=settings.gradient_sync == "overlap" and dist.get_world_size() > 1,
            bucket_mb=settings.bucket_cap_mb,
            peer_wait=self.timer.peer_wait,
        )
        self.steps = self.skipped_in_a_row = 0
        self.before_update: Callable[[], None] | None = None
        self.norm_wanted = False
        self.gradient_norm: Tensor | None = None
        self._max_log_scale = math.log(settings.max_logit_scale)
        self.is_skipped = torch.zeros((), device=self.device, dtype=torch.bool)
        # On the device: the first bad step; steps skipped since the last count, and consecutive
        # ones.
        self._first_bad_step = torch.full((1,), NEVER, device=self.device)
        self._skipped = torch.zeros(2, device=self.device, dtype=torch.long)

    def optimize_towers(self, loader: BatchSource, model: ModelSettings, what: str) -> Summary:
        """Before the first step, choose kernels on CUDA and compile `what` (`clap.compile`) for the
          loader's batches.
        A collective; returns fields to record."""
        found = Summary()
        if self.device.type == "cuda":
            set_compile_cache()
            autocast = self.deepspeed.torch_autocast_enabled()
            with torch.random.fork_rng([self.device]):
                found["kernels"] = replace_failing_kernels(model, self.model, autocast=autocast)
        if (what := resolve_compile_mode(what, self.device)) != "off":
            found |= compile_towers(self.deepspeed, loader.peek(), what, cached=self.cached)
        return found

    def step(self, batches: Iterator[Batch], *, waits: bool = False) -> Tensor:
        """Take one optimizer step: call `accumulate`, update, and return its loss. With `waits`,
          DeepSpeed's throughput timer
        waits for the device at its end, as the caller will."""
        self.deepspeed.tput_timer.start()  # before waiting for data
        skipped_before = self.deepspeed.skipped_steps
        statistics = [buffer.clone() for buffer in self.model.running_statistics()]
        loss_mean = self.accumulate(batches)
        timer = self.deepspeed.tput_timer.config
        before = timer.synchronized
        timer.synchronized = timer.synchronized or waits
        self._update()
        timer.synchronized = before
        self.steps += 1
        self._note_step(
            loss_mean, statistics, by_deepspeed=self.deepspeed.skipped_steps > skipped_before
        )
        watch.step(self.steps)
        return loss_mean

    def stop_timers(self) -> StepTimes:
        """End a window of timed steps, also for DeepSpeed's throughput timer. Wait for the device
        and return the times."""
        times = self.timer.stop()
        self.deepspeed.tput_timer.pause()
        return times

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step, and name it to the watchdog."""
        watch.phase = name
        return self.timer(name)

    def accumulate(self, batches: Iterator[Batch]) -> Tensor:
        """Run forward and backward of a step's micro-batches, without the update. Return their mean
          loss, scalar fp32 on the
        device, detached; with cached accumulation the loss of this rank's pairs against all pairs
          of the step."""
        number = self.deepspeed.gradient_accumulation_steps()
        if self.cached:
            return self._cached_micro_steps(batches, number)
        loss_sum = torch.zeros((), device=self.device)
        for left in reversed(range(number)):
            with self._phase("data_wait"):
                batch = next(batches)
            self.deepspeed.set_gradient_accumulation_boundary(left == 0)
            with self._phase("forward"):
                features = self.deepspeed(*batch.model_inputs())
            with self._phase("loss"):
                loss = self.loss(*features)
            with self._phase("backward"):
                self.sync.backward(loss)
            loss_sum += loss.detach()
            self._count_micro_batch()
        return loss_sum / number

    def _cached_micro_steps(self, batches: Iterator[Batch], number: int) -> Tensor:
        with self._phase("data_wait"):
            micro_batches = [next(batches) for _ in range(number)]
        with self._phase("forward"):
            leaves, states = first_pass(self.deepspeed, self.model, micro_batches)
        with self._phase("loss"):
            loss = self.loss(*leaves)
            gradients = torch.autograd.grad(loss, leaves)
        for i, (batch, state) in enumerate(zip(micro_batches, states, strict=True)):
            with self._phase("forward"):
                self.deepspeed.set_gradient_accumulation_boundary(i == number - 1)
                surrogate = second_pass(self.deepspeed, batch, state, gradients, i, number)
            with self._phase("backward"):
                self.sync.backward(surrogate, scale_wrt_gas=False)
            self._count_micro_batch()
        return loss.detach()

    def _count_micro_batch(self) -> None:
        """Make DeepSpeed count a micro-batch unless it is the step's last."""
        if not self.deepspeed.is_gradient_accumulation_boundary():
            with self._phase("optimizer"):
                self.deepspeed.step()

    def set_accumulation_steps(self, number: int) -> None:
        """Set the number of micro-batches for all following steps."""
        if number != self.deepspeed.gradient_accumulation_steps():
            per_micro_step = (
                self.deepspeed.train_micro_batch_size_per_gpu() * self.deepspeed.dp_world_size
            )
            self.deepspeed.set_train_batch_size(number * per_micro_step)
            self.deepspeed.tput_timer.batch_size = number * per_micro_step

    @torch.no_grad()
    def _update(self) -> None:
        """Update the weights, their average and, if wanted, the gradient norm. In 16 bits
          DeepSpeed's optimizer has clipped.
        The learned scale is clamped to [1, `max_logit_scale`], in the parameter and in the
          optimizer's fp32 copy."""
        if self.before_update is not None:
            self.before_update()
        clip = self.deepspeed.gradient_clipping()
        in_16_bits = hasattr(self.deepspeed.optimizer, "_global_grad_norm")
        with self._phase("optimizer"):
            if not in_16_bits and (self.norm_wanted or clip > 0):
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                self.gradient_norm = torch.nn.utils.get_total_norm(gradients)
                if clip > 0:
                    torch.nn.utils.clip_grads_with_norm_(
                        self.model.parameters(), clip, self.gradient_norm
                    )
            self.deepspeed.step()
            for scale in (self.model.logit_scale, self.masters["logit_scale"]):
                scale.clamp_(0, self._max_log_scale)
            if self.average is not None:
                self.average.update()
        if self.norm_wanted and in_16_bits:
            norm = self.deepspeed.get_global_grad_norm()
            self.gradient_norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def _note_step(self, loss: Tensor, statistics: list[Tensor], *, by_deepspeed: bool) -> None:
        """Record on the device whether the step was skipped, and the first step with a loss or
          gradient that isn't finite.
        Restore the batch norm's `statistics` after a skipped step."""
        if self._flat_step is None:
            self.is_skipped = torch.full_like(self.is_skipped, by_deepspeed)
        else:
            self.is_skipped = self._flat_step.skipped
            self._skipped[0].add_(self.is_skipped)
        self._skipped[1].add_(1).mul_(self.is_skipped)
        for buffer, before in zip(self.model.running_statistics(), statistics, strict=True):
            buffer.copy_(torch.where(self.is_skipped, before, buffer))  # they may include a NaN
        is_bad = ~loss.isfinite()
        if (
            self.norm_wanted
        ):  # without it the run is a benchmark, which a NaN loss always invalidates
            if self.gradient_norm is not None:
                is_bad |= ~self.gradient_norm.isfinite()
            is_bad &= ~self.is_skipped
        self._first_bad_step.clamp_(max=torch.where(is_bad, self.steps, NEVER))

    def count_skipped(self) -> None:
        """Update `skipped_in_a_row` and DeepSpeed's `skipped_steps`. Waits for the device."""
        since, self.skipped_in_a_row = self._skipped.tolist()
        self.deepspeed.skipped_steps += since
        self._skipped[0] = 0

    def may_be_saved(self, loss: Tensor, *, is_last: bool) -> bool:
        """Return whether the state may be saved: not if the step was skipped because the loss isn't
          finite on some rank, rather
        than because fp16's loss scale was too large. Such a state would be resumed forever. Raises
          NonFiniteError like
        `check_loss`, `is_last` at once. A collective."""
        self.count_skipped()
        if not self.skipped_in_a_row or reduce_on_rank0(bool(loss.isfinite()), all):
            return True
        self.check_loss(at_once=is_last)
        return False

    def check_loss(self, *, at_once: bool = False) -> None:
        """Raise NonFiniteError on all ranks if any step's loss or, with `norm_wanted`, gradient
          isn't finite, or if the last
        `MOST_SKIPPED` steps (with `at_once`, the last one) were skipped. A collective that waits
          for the device."""
        self.count_skipped()
        first_bad = self._first_bad_step.clone()
        dist.all_reduce(first_bad, op=dist.ReduceOp.MIN)
        if int(first_bad) != NEVER:
            what = "the loss or its gradient" if self.norm_wanted else "the loss"
            raise NonFiniteError(f"{what} is NaN or infinite at step {int(first_bad)}")
        if self.skipped_in_a_row >= (1 if at_once else MOST_SKIPPED):
            since = self.steps - self.skipped_in_a_row + 1
            raise NonFiniteError(
                f"the loss or its gradient is NaN or infinite in every step from step {since} on"
            )

    def share_statistics(self) -> None:
        """Copy rank 0's batch norm statistics, which checkpoints contain, to every rank. A
        collective."""
        for buffer in self.model.running_statistics():
            dist.broadcast(buffer, src=0)
