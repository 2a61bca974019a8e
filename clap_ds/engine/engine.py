"""Train a CLAP model with DeepSpeed's engine.

A step runs forward and backward of its micro-batches, averages gradients over ranks, clips and
updates, bounds the logit scale, and detects losses that aren't finite. After a run's first step
with `FlatStep`, the host doesn't read from the device until losses are checked.
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
from clap_ds.engine import deepspeed_compat
from clap_ds.engine.compile import compile_towers, resolve_compile_mode, set_compile_cache
from clap_ds.engine.factory import wrap
from clap_ds.engine.grad_cache import first_pass, second_pass
from clap_ds.engine.gradient_sync import GradientSync
from clap_ds.engine.kernel_fallback import replace_failing_kernels
from clap_ds.engine.optimizer import FlatStep, ModelEma, master_weights
from clap_ds.metrics.tensorboard import Scalar
from clap_ds.metrics.timers import StepTimer, StepTimes
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.run_records.run_dir import quiet_deepspeed
from clap_ds.run_records.schema import Summary

# The first bad step of a run that has none.
NEVER = torch.iinfo(torch.long).max
# fp16's loss scale starts at 2^16 and may need to be halved that often.
MAX_CONSECUTIVE_SKIPS = 40


class NonFiniteError(RuntimeError):
    """The loss, its gradient or the weights became NaN or infinite; raised on all ranks."""

    fault = error_file.ALL_RANKS


class ClapEngine:
    """A CLAP model wrapped with DeepSpeed, and its training step.

    Attributes:
        deepspeed, config: DeepSpeed's engine around the model, and its configuration.
        masters: the optimizer's fp32 weights by name, in its order; they may be the model's own.
        timer: times phases of steps.
        uses_gradcache: whether gradients are accumulated with GradCache.
        ema: EMA of the weights with `clap.train.ema_decay`; every step updates it, including
            skipped ones.
        steps: number of optimizer steps, including skipped ones.
        is_skipped: whether the last step was skipped because a 16-bit gradient wasn't finite;
            scalar bool on the device.
        consecutive_skips: number of consecutive skipped steps up to the last `count_skipped`.
        pre_step_hook: if set, called in every step with the averaged gradients in the parameters.
        log_gradient_norm: compute `gradient_norm` in every step, and require that it is finite.
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
        """Wrap a model on its device. A collective; raises ValueError if DeepSpeed rejects its
        sections.

        Args:
            model: from `build_model`, which has applied `train.freeze`.
            loss: from `build_loss`.
            deepspeed: DeepSpeed's configuration.
        """
        self.device = model.logit_scale.device
        self.model = model
        self.loss = loss
        self.config = deepspeed
        self.timer = timer or StepTimer(self.device)
        self.uses_gradcache = train.accumulation == "gradcache"
        if self.device.type == "cpu" and settings.cpu_kernels == "auto":
            patch_model(model)
        # With GradCache the loss compares features of several forward passes.
        if hasattr(loss, "gather_early") and not self.uses_gradcache:
            loss.gather_early(model)

        with quiet_deepspeed():
            self.deepspeed = wrap(model, deepspeed, settings, train)
        # `_update` clips.
        deepspeed_compat.disable_fp32_clipping(self.deepspeed)
        # Without it, DeepSpeed's wrapper reads norms on the host and skips steps itself.
        self._flat_step: FlatStep | None = None
        if FlatStep.is_applicable(self.deepspeed.optimizer):
            self._flat_step = FlatStep(self.deepspeed.optimizer, self.deepspeed.gradient_clipping())
        self.masters = master_weights(model, self.deepspeed.optimizer)
        self.ema: ModelEma | None = None
        if train.ema_decay:
            self.ema = ModelEma(model, self.masters, train.ema_decay)
        self.sync = GradientSync(
            self.deepspeed,
            overlapped=settings.gradient_sync == "overlap" and dist.get_world_size() > 1,
            bucket_mb=settings.bucket_cap_mb,
            peer_wait=self.timer.peer_wait,
        )

        self.steps = 0
        self.consecutive_skips = 0
        self.pre_step_hook: Callable[[], None] | None = None
        self.log_gradient_norm = False
        self.gradient_norm: Tensor | None = None
        self._max_log_scale = math.log(settings.max_logit_scale)
        # These are on the device, so that a step doesn't wait for it.
        self.is_skipped = torch.zeros((), device=self.device, dtype=torch.bool)
        self._first_bad_step = torch.full((1,), NEVER, device=self.device)
        # Skipped steps since the last `count_skipped`, and consecutive ones.
        self._skips = torch.zeros(2, device=self.device, dtype=torch.long)

    def optimize_towers(
        self,
        loader: BatchSource,
        model: ModelSettings,
        compile_setting: str,
        local_rank: int = 0,
    ) -> Summary:
        """Before the first step, choose kernels on CUDA and compile parts (`clap.compile`) for the
        loader's batches. A collective; returns fields to record. `local_rank`: this rank's number
        on its host."""
        choices = Summary()
        if self.device.type == "cuda":
            set_compile_cache()
            autocast = self.deepspeed.torch_autocast_enabled()
            # Trial passes draw random numbers.
            with torch.random.fork_rng([self.device]):
                choices["kernels"] = replace_failing_kernels(
                    model,
                    self.model,
                    longest_caption=loader.peek().input_ids.shape[1],
                    autocast=autocast,
                )
        mode = resolve_compile_mode(compile_setting, self.device)
        if mode != "off":
            batch = loader.peek()
            choices |= compile_towers(
                self.deepspeed, batch, mode, cached=self.uses_gradcache, local_rank=local_rank
            )
        return choices

    def step(self, batches: Iterator[Batch], *, waits: bool = False) -> Tensor:
        """Take one optimizer step, and return its loss as `accumulate` does.

        Args:
            waits: whether DeepSpeed's throughput timer waits for the device at the step's end, as
                the caller will.
        """
        # Before waiting for data, which DeepSpeed's throughput includes.
        self.deepspeed.tput_timer.start()
        skipped_before = self.deepspeed.skipped_steps
        statistics = [buffer.clone() for buffer in self.model.running_statistics()]
        loss = self.accumulate(batches)
        with self.deepspeed.tput_timer.synchronized(waits):
            self._update()
        self.steps += 1
        self._note_skip(statistics, by_deepspeed=self.deepspeed.skipped_steps > skipped_before)
        self._note_non_finite(loss)
        watch.step(self.steps)
        return loss

    def stop_timers(self) -> StepTimes:
        """End a window of timed steps, also for DeepSpeed's throughput timer. Wait for the device
        and return the times."""
        times = self.timer.stop()
        self.deepspeed.tput_timer.pause()
        return times

    def defer_monitor_events(
        self, receive: Callable[[list[Scalar]], object], *, enabled: bool
    ) -> Callable[[list[Scalar]], None]:
        """Pass the events of DeepSpeed's monitors to `receive`; see `deepspeed_compat`."""
        return deepspeed_compat.defer_monitor_events(self.deepspeed, receive, enabled=enabled)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step, and name it to the watchdog."""
        watch.phase = name
        return self.timer(name)

    def accumulate(self, batches: Iterator[Batch]) -> Tensor:
        """Run forward and backward of a step's micro-batches, without the update.

        Returns their mean loss, scalar fp32 on the device, detached; with GradCache the loss of
        this rank's pairs against all pairs of the step.
        """
        num_micro_batches = self.deepspeed.gradient_accumulation_steps()
        if self.uses_gradcache:
            return self._accumulate_with_gradcache(batches, num_micro_batches)
        # The host must not read losses, so they are added up on the device.
        loss_sum = torch.zeros((), device=self.device)
        for _ in self._micro_steps(num_micro_batches):
            with self._phase("data_wait"):
                batch = next(batches)
            with self._phase("forward"):
                features = self.deepspeed(*batch.model_inputs())
            with self._phase("loss"):
                loss = self.loss(*features)
            with self._phase("backward"):
                self.sync.backward(loss)
            loss_sum += loss.detach()
        return loss_sum / num_micro_batches

    def _accumulate_with_gradcache(
        self, batches: Iterator[Batch], num_micro_batches: int
    ) -> Tensor:
        with self._phase("data_wait"):
            micro_batches = [next(batches) for _ in range(num_micro_batches)]
        with self._phase("forward"):
            leaves, rng_states = first_pass(self.deepspeed, self.model, micro_batches)
        with self._phase("loss"):
            loss = self.loss(*leaves)
            # By the features of all micro-batches, and by the scalars.
            gradients = torch.autograd.grad(loss, leaves)
        for number in self._micro_steps(num_micro_batches):
            with self._phase("forward"):
                surrogate = second_pass(
                    self.deepspeed,
                    micro_batches[number],
                    rng_states[number],
                    gradients,
                    number,
                    num_micro_batches,
                )
            with self._phase("backward"):
                # The surrogates' gradients add up to the whole batch's: DeepSpeed must not average.
                self.sync.backward(surrogate, scale_wrt_gas=False)
        return loss.detach()

    def _micro_steps(self, number: int) -> Iterator[int]:
        """Yield the numbers of a step's forward and backward passes, from 0. DeepSpeed averages
        gradients over ranks and updates weights only after the last one."""
        for micro_step in range(number):
            is_last = micro_step == number - 1
            self.deepspeed.set_gradient_accumulation_boundary(is_last)
            yield micro_step
            # DeepSpeed counts the micro-batch. The last one is counted by the update.
            if not is_last:
                with self._phase("optimizer"):
                    self.deepspeed.step()

    def set_accumulation_steps(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches for all following steps."""
        if num_micro_batches == self.deepspeed.gradient_accumulation_steps():
            return
        micro_batch = self.deepspeed.train_micro_batch_size_per_gpu()
        batch_size = num_micro_batches * micro_batch * self.deepspeed.dp_world_size
        self.deepspeed.set_train_batch_size(batch_size)
        self.deepspeed.tput_timer.batch_size = batch_size

    @torch.no_grad()
    def _update(self) -> None:
        """Clip gradients and update the weights, their EMA and, if wanted, the gradient norm."""
        if self.pre_step_hook is not None:
            self.pre_step_hook()
        in_16_bits = deepspeed_compat.is_16_bit_wrapper(self.deepspeed.optimizer)
        with self._phase("optimizer"):
            if not in_16_bits:
                # DeepSpeed's 16-bit optimizers clip in their step.
                self._clip_fp32_gradients()
            self.deepspeed.step()
            # CLIP keeps the scale in [1, max_logit_scale]. In 16 bits the optimizer has a copy.
            for log_scale in (self.model.logit_scale, self.masters["logit_scale"]):
                log_scale.clamp_(0, self._max_log_scale)
            if self.ema is not None:
                self.ema.update()
        if in_16_bits and self.log_gradient_norm:
            norm = self.deepspeed.get_global_grad_norm()
            self.gradient_norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def _clip_fp32_gradients(self) -> None:
        max_norm = self.deepspeed.gradient_clipping()
        if not self.log_gradient_norm and max_norm == 0:
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.gradient_norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(), max_norm, self.gradient_norm
            )

    def _note_skip(self, statistics: list[Tensor], *, by_deepspeed: bool) -> None:
        """Record on the device whether the step was skipped, and then restore the batch norm's
        `statistics`, as the new ones may include a NaN."""
        # fp32 runs never skip; fp16 runs and other optimizers skip on the host.
        if self._flat_step is None:
            # DeepSpeed has counted it.
            self.is_skipped = torch.full_like(self.is_skipped, by_deepspeed)
        else:
            self.is_skipped = self._flat_step.skipped
            self._skips[0].add_(self.is_skipped)
        # c = (c + 1) · is_skipped
        self._skips[1].add_(1).mul_(self.is_skipped)
        for buffer, previous in zip(self.model.running_statistics(), statistics, strict=True):
            buffer.copy_(torch.where(self.is_skipped, previous, buffer))

    def _note_non_finite(self, loss: Tensor) -> None:
        """Record on the device the first step with a loss or gradient that isn't finite."""
        is_bad = ~loss.isfinite()
        if self.log_gradient_norm:
            if self.gradient_norm is not None:
                is_bad |= ~self.gradient_norm.isfinite()
            # A skipped step does no harm in training. A benchmark, which wants no norm, is invalid.
            is_bad &= ~self.is_skipped
        self._first_bad_step.clamp_(max=torch.where(is_bad, self.steps, NEVER))

    def count_skipped(self) -> None:
        """Update `consecutive_skips` and DeepSpeed's `skipped_steps`. Waits for the device."""
        # One read for both.
        num_skipped, self.consecutive_skips = self._skips.tolist()
        self.deepspeed.skipped_steps += num_skipped
        self._skips[0] = 0

    def is_checkpointable(self, loss: Tensor, *, is_last: bool) -> bool:
        """Return whether the state may be saved: not if the step was skipped because the loss isn't
        finite on some rank, rather than because fp16's loss scale was too large. Such a state would
        be resumed forever. Raises NonFiniteError like `check_loss`, `is_last` at once. A
        collective."""
        self.count_skipped()
        if not self.consecutive_skips or reduce_on_rank0(bool(loss.isfinite()), all):
            return True
        self.check_loss(at_once=is_last)
        return False

    def check_loss(self, *, at_once: bool = False) -> None:
        """Raise NonFiniteError on all ranks if any step's loss or, with `log_gradient_norm`, gradient
        isn't finite, or if the last `MAX_CONSECUTIVE_SKIPS` steps (with `at_once`, the last one)
        were skipped. A collective that waits for the device."""
        self.count_skipped()
        first_bad_step = self._first_bad_step.clone()
        # Ranks have different losses, but must stop together.
        dist.all_reduce(first_bad_step, op=dist.ReduceOp.MIN)
        if int(first_bad_step) != NEVER:
            name = "the loss or its gradient" if self.log_gradient_norm else "the loss"
            raise NonFiniteError(f"{name} is NaN or infinite at step {int(first_bad_step)}")
        # A loss scale may be found after several skips, unless the run ends here.
        max_skips = 1 if at_once else MAX_CONSECUTIVE_SKIPS
        if self.consecutive_skips >= max_skips:
            since = self.steps - self.consecutive_skips + 1
            raise NonFiniteError(
                f"the loss or its gradient is NaN or infinite in every step from step {since} on"
            )

    def broadcast_bn_statistics(self) -> None:
        """Copy rank 0's batch norm statistics, which checkpoints contain, to every rank. A
        collective."""
        for buffer in self.model.running_statistics():
            dist.broadcast(buffer, src=0)
