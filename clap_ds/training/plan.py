"""Length of a training run, and what is due after each step. Imports neither torch nor DeepSpeed.

Check what training requires of a run's JSON, before torch is imported.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config import schema
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.schema import CheckpointSettings, EvaluationSettings, ShardData, TrainSettings
from clap_ds.config.settings import ClapSettings
from clap_ds.data.shard_io import check_url, is_remote


class Due(NamedTuple):
    """What is due after a step."""

    log: bool
    evaluate: bool
    save: bool
    stop: bool


@dataclass(frozen=True)
class TrainPlan:
    """Length of a run, and steps between its actions (None: only at the end).

    Attributes:
        samples: total audio–caption pairs.
        global_batch: the global batch, after the `ramp`: [samples, global batch from then on].
        epoch_samples: pairs in one pass over the data, if known.
    """

    samples: int
    global_batch: int
    epoch_samples: int | None = None
    log_every: int = 10
    evaluate_every: int | None = None
    save_every: int | None = None
    target_metrics: dict[str, float] = field(default_factory=dict)
    ramp: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        train: TrainSettings,
        evaluation: EvaluationSettings,
        checkpoint: CheckpointSettings,
        sizes: BatchSizes,
        epoch_samples: int | None,
    ) -> Self:
        """Compute it from a run's sections. ValueError if epochs are requested and their length is
        unknown."""
        samples = train.max_samples
        epochs = train.epochs
        if epochs is not None:
            if epoch_samples is None:
                raise ValueError(
                    "clap.train.epochs: the length of an epoch of remote shards is unknown without their manifest.json"
                    " (clap-ds shards prepare); add it, or set clap.train.max_samples"
                )
            samples = math.ceil(epochs * epoch_samples)
        assert samples is not None
        every = train.log_every_steps, evaluation.every_steps, checkpoint.every_steps
        return cls(
            samples,
            sizes.global_batch,
            epoch_samples,
            *every,
            train.target_metrics,
            train.batch_ramp,
        )

    def is_done(self, state: TrainState) -> bool:
        """Return whether all samples are consumed, or the target metrics reached."""
        return state.samples >= self.samples or state.reached(self.target_metrics) is not None

    def batch(self, samples: int) -> int:
        """Return the global batch of the step that starts after so many samples."""
        return next(
            (batch for start, batch in reversed(self.ramp) if samples >= start), self.global_batch
        )

    def advance(self, state: TrainState) -> None:
        """Count a step."""
        state.step += 1
        state.samples += self.batch(state.samples)
        state.epoch = round(state.samples / self.epoch_samples, 6) if self.epoch_samples else None

    def due(self, state: TrainState, signal: int, is_late: bool = False) -> Due:
        """Return what is due after a step, given the signal to stop, or 0, and whether a checkpoint
          is late. A save stays due
        until one has started."""
        is_last = state.samples >= self.samples
        stop = signal != 0 or self.is_done(state)
        evaluate = is_last or (
            self.evaluate_every is not None and state.step % self.evaluate_every == 0
        )
        every = self.save_every
        save = (
            stop
            or is_late
            or (every is not None and state.step // every > state.saved_step // every)
        )
        log = evaluate or save or state.step % self.log_every == 0
        return Due(log, evaluate and not signal, save, stop)

    def last_step(self, state: TrainState) -> int:
        """Return the run's last step."""
        step = state.step
        samples = state.samples
        for end in [*(start for start, _ in self.ramp[1:]), self.samples]:
            steps = max(0, math.ceil((min(end, self.samples) - samples) / self.batch(samples)))
            step = step + steps
            samples = samples + steps * self.batch(samples)
        return step


def problems_for_training(
    clap: ClapSettings, deepspeed: dict[str, Any], world_size: int | None = None
) -> list[str]:
    """Return what prevents training on `world_size` ranks, if known: one line per problem, with
    field and expectation."""
    train = clap.train
    evaluation = clap.evaluation
    problems = []
    sizes = BatchSizes.of(deepspeed, world_size)
    micro_batches = sizes.accumulation_steps if train.accumulation == "gradcache" else 1
    if (world_size or 2) * sizes.micro_batch * micro_batches == 1:
        problems.append(
            "train_micro_batch_size_per_gpu: 1 on 1 rank gives batches of one pair, which have no negatives: increase it, or"
            ' set clap.train.accumulation "gradcache" with gradient_accumulation_steps above 1'
        )
    if train.batch_ramp:
        problems += _problems_with_ramp(train.batch_ramp, sizes, world_size)
    if train.max_samples is None and train.epochs is None:
        problems.append("clap.train: max_samples and epochs are missing: set one of them")
    data = clap.data
    if train.epochs is not None and not (isinstance(data, ShardData) and data.has_epochs):
        without = "synthetic data, mixtures and clap.data.resampled"
        problems.append(f"clap.train.epochs: {without} have no epochs; set clap.train.max_samples")
    named = [("clap.train.target_metrics", name) for name in train.target_metrics]
    if clap.checkpoint.best_metric is not None:
        named.append(("clap.checkpoint.best_metric", clap.checkpoint.best_metric))
    known = schema.names(evaluation)
    problems += [
        f"{field}: no evaluation computes {name!r}; available: {', '.join(known) or 'none, as clap.evaluation is empty'}"
        for field, name in named
        if name not in known
    ]
    if train.target_metrics and evaluation.every_steps is None:
        problems.append("clap.train.target_metrics: clap.evaluation.every_steps is missing; set it")
    return problems + _problems_with_urls(clap)


def _problems_with_ramp(
    ramp: list[list[int]], sizes: BatchSizes, world_size: int | None
) -> list[str]:
    starts, batches = zip(*ramp, strict=True)
    problems = {
        "expected increasing numbers of samples, the first 0": [*starts] != sorted({0, *starts})
    }
    if world_size is not None:
        unit = sizes.micro_step
        whole = sizes.global_batch
        wrong = [batch for batch in batches if batch < unit or batch % unit]
        problems[f"expected multiples of {unit}, the micro-batches of all ranks, found {wrong}"] = (
            wrong != []
        )
        problems[
            f"expected the run's global batch {whole} as the last one, found {batches[-1]}"
        ] = batches[-1] != whole
    return [
        f"clap.train.batch_ramp: {problem}" for problem, is_there in problems.items() if is_there
    ]


def _problems_with_urls(clap: ClapSettings) -> list[str]:
    """Return URLs with credentials or unsupported protocols; connects to nothing. Those of shards
    are checked with them."""
    problems = []
    for setting, url in (
        ("checkpoint.remote_sync", clap.checkpoint.remote_sync),
        ("train.resume", clap.train.resume),
    ):
        try:
            if url and is_remote(url):
                check_url(url)
        except ValueError as error:
            problems.append(f"clap.{setting}: {error}")
    return problems
