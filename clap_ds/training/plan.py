"""Compute the length of a training run and the actions due after each step, and check a run's JSON.

The checks run before torch is imported: this module imports neither torch nor DeepSpeed.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config import schema
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.schema import ShardData
from clap_ds.config.settings import ClapSettings


class StepActions(NamedTuple):
    """The actions that are due after a step."""

    log: bool
    evaluate: bool
    save: bool
    stop: bool


@dataclass(frozen=True)
class TrainPlan:
    """Length of a run, and steps between its actions (None: only at the end).

    Attributes:
        samples: total audio–caption pairs.
        global_batch: the global batch, after the `ramp`.
        epoch_samples: pairs in one pass over the data, if known.
        ramp: pairs of a number of samples and the global batch from then on, ascending.
        profiled_steps: the profiler's warm-up step and recorded steps, which throughput doesn't
            count.
    """

    samples: int
    global_batch: int
    epoch_samples: int | None = None
    log_every: int = 10
    evaluate_every: int | None = None
    save_every: int | None = None
    histogram_every: int | None = None
    target_metrics: dict[str, float] = field(default_factory=dict)
    ramp: list[list[int]] = field(default_factory=list)
    profiled_steps: range = range(0)

    @classmethod
    def from_settings(
        cls, clap: ClapSettings, sizes: BatchSizes, epoch_samples: int | None, step: int = 0
    ) -> Self:
        """Compute the plan of a run that starts after `step`. Raises ValueError for epochs of unknown
        length."""
        train = clap.train
        samples = train.max_samples
        if train.epochs is not None:
            if epoch_samples is None:
                raise ValueError(
                    "clap.train.epochs: the length of an epoch of remote shards is unknown without"
                    " their manifest.json"
                    " (clap-ds shards prepare); add it, or set clap.train.max_samples"
                )
            # A part of an epoch is rounded up to whole samples.
            samples = math.ceil(train.epochs * epoch_samples)
        # `problems_for_training` requires one of the two.
        assert samples is not None
        profiled_steps = range(0)
        if clap.profile is not None:
            profiled_steps = clap.profile.steps_from(step + clap.profile.start_step)
        return cls(
            samples=samples,
            global_batch=sizes.global_batch,
            epoch_samples=epoch_samples,
            log_every=train.log_every_steps,
            evaluate_every=clap.evaluation.every_steps,
            save_every=clap.checkpoint.every_steps,
            histogram_every=train.histogram_every_steps,
            target_metrics=train.target_metrics,
            ramp=train.batch_ramp,
            profiled_steps=profiled_steps,
        )

    def is_done(self, state: TrainState) -> bool:
        """Return whether all samples are consumed, or the target metrics reached."""
        return state.samples >= self.samples or self.time_to_target_s(state) is not None

    def time_to_target_s(self, state: TrainState) -> float | None:
        """Return the training time until an evaluation reached the target metrics, or None."""
        # A resumed run may have other targets.
        if not self.target_metrics or state.extra.get("target") != self.target_metrics:
            return None
        return state.extra["time_to_target_s"]

    def describe_target(self, state: TrainState) -> str | None:
        """Return a message with step and time at which the target metrics were reached, or
        None."""
        seconds = self.time_to_target_s(state)
        if seconds is None:
            return None
        values = ", ".join(f"{name} {value:g}" for name, value in self.target_metrics.items())
        # Earlier versions recorded no step.
        step = state.extra.get("target_step", state.step)
        return f"target reached at step {step}, after {seconds:,.0f} s: {values}"

    def batch(self, samples: int) -> int:
        """Return the global batch of the step that starts after so many samples."""
        # The last start that is reached.
        for start, batch in reversed(self.ramp):
            if samples >= start:
                return batch
        return self.global_batch

    def advance(self, state: TrainState) -> None:
        """Count a step."""
        state.step += 1
        state.samples += self.batch(state.samples)
        state.epoch = round(state.samples / self.epoch_samples, 6) if self.epoch_samples else None

    def due(self, state: TrainState, signal: int, is_late: bool = False) -> StepActions:
        """Return the actions that are due after a step.

        Args:
            signal: the signal to stop, or 0.
            is_late: whether the time between checkpoints has passed.
        """
        step = state.step
        stop = signal != 0 or self.is_done(state)
        # The last step is always evaluated.
        evaluate = state.samples >= self.samples
        if self.evaluate_every is not None:
            evaluate |= step % self.evaluate_every == 0
        save = stop or is_late
        if self.save_every is not None:
            # A save stays due until one has started: a step with a bad loss isn't saved.
            save |= step // self.save_every > state.saved_step // self.save_every
        # An evaluation or a save would count as a step's time.
        log = evaluate or save or step % self.log_every == 0
        # The launcher kills a signaled run soon, so saving comes before evaluating.
        return StepActions(log, evaluate and signal == 0, save, stop)

    def last_step(self, state: TrainState) -> int:
        """Return the run's last step."""
        step = state.step
        samples = state.samples
        # Steps within each stage of the ramp; a step may end in the next one.
        ends = [start for start, _ in self.ramp[1:]]
        for end in [*ends, self.samples]:
            batch = self.batch(samples)
            steps = max(0, math.ceil((min(end, self.samples) - samples) / batch))
            step += steps
            samples += steps * batch
        return step


def problems_for_training(
    clap: ClapSettings, deepspeed: dict[str, Any], world_size: int | None = None
) -> list[str]:
    """Return what prevents training on `world_size` ranks, if known: one line per problem, with
    field and expectation."""
    train = clap.train
    sizes = BatchSizes.from_config(deepspeed, world_size)
    problems = []
    # Pairs that one loss compares; several ranks are assumed if their number is unknown.
    num_ranks = world_size or 2
    pairs = num_ranks * sizes.micro_batch
    if train.accumulation == "gradcache":
        pairs *= sizes.gradient_accumulation_steps
    if pairs == 1:
        problems.append(
            "train_micro_batch_size_per_gpu: 1 on 1 rank gives batches of one pair, which have no"
            " negatives: increase it, or"
            ' set clap.train.accumulation "gradcache" with gradient_accumulation_steps above 1'
        )
    if train.batch_ramp:
        ramp_problems = _problems_with_ramp(train.batch_ramp, sizes, world_size)
        problems += [f"clap.train.batch_ramp: {problem}" for problem in ramp_problems]
    # The last step depends on the number of ranks and, for epochs, on the data.
    if clap.profile is not None and train.max_samples and world_size and not problems:
        plan = TrainPlan.from_settings(clap, sizes, epoch_samples=None)
        profiled = plan.profiled_steps[1:]
        last_step = plan.last_step(TrainState())
        if profiled[-1] > last_step:
            expected = f"expected steps up to {last_step}, the run's last"
            problems.append(f"clap.profile: {expected}, found {profiled[0]} to {profiled[-1]}")
    if train.max_samples is None and train.epochs is None:
        problems.append("clap.train: max_samples and epochs are missing: set one of them")
    has_epochs = isinstance(clap.data, ShardData) and clap.data.has_epochs
    if train.epochs is not None and not has_epochs:
        problems.append(
            "clap.train.epochs: synthetic data, mixtures and clap.data.resampled have no epochs;"
            " set clap.train.max_samples"
        )
    return problems + _problems_with_metrics(clap)


def _problems_with_ramp(
    ramp: list[list[int]], sizes: BatchSizes, world_size: int | None
) -> list[str]:
    starts = [start for start, _ in ramp]
    batches = [batch for _, batch in ramp]
    problems = []
    if starts != sorted({0, *starts}):
        problems.append("expected increasing numbers of samples, the first 0")
    # Batch sizes depend on the number of ranks.
    if world_size is None:
        return problems
    # The global batch grows by accumulation steps.
    unit = sizes.micro_step
    if wrong := [batch for batch in batches if batch < unit or batch % unit]:
        problems.append(
            f"expected multiples of {unit}, the micro-batches of all ranks, found {wrong}"
        )
    if batches[-1] != sizes.global_batch:
        problems.append(
            f"expected the run's global batch {sizes.global_batch} as the last one, found"
            f" {batches[-1]}"
        )
    return problems


def _problems_with_metrics(clap: ClapSettings) -> list[str]:
    """Return metrics that no evaluation computes, and targets that are never evaluated."""
    targets = clap.train.target_metrics
    required = [("clap.train.target_metrics", name) for name in targets]
    if clap.checkpoint.best_metric is not None:
        required.append(("clap.checkpoint.best_metric", clap.checkpoint.best_metric))
    available = schema.list_metrics(clap.evaluation)
    listed = ", ".join(available) or "none, as clap.evaluation is empty"
    problems = [
        f"{setting}: no evaluation computes {name!r}; available: {listed}"
        for setting, name in required
        if name not in available
    ]
    if targets and clap.evaluation.every_steps is None:
        problems.append("clap.train.target_metrics: clap.evaluation.every_steps is missing; set it")
    return problems
