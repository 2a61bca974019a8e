"""The training loop: steps, evaluations and checkpoints until the samples are through, a target is reached or a signal comes.

Ranks, model, data and engine are the session's, what a step is the engine's. What a run starts from is `start`'s, how it tells
of itself `log`'s.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from clap_ds.config.errors import AgreedError
from clap_ds.config.sections import ShardData
from clap_ds.data.batch import Batch
from clap_ds.data.shard_manifest import epoch_samples
from clap_ds.dist.agreement import on_first, together
from clap_ds.dist.distributed import leave
from clap_ds.engine.session import Interrupted, Session
from clap_ds.training.log import TrainingLog
from clap_ds.training.progress import Progress, SavedCheckpoint
from clap_ds.training.schedule import Schedule
from clap_ds.training.start import TrainingStart
from clap_ds.training.stop import StopRequest

if TYPE_CHECKING:
    from clap_ds.evaluation.evaluator import Evaluator


def train(session: Session, start: TrainingStart) -> None:
    """Train until `clap.train` is fulfilled.

    Raises:
        AgreedError: evaluation or epochs aren't possible as the settings want them, or the last checkpoint can't be saved.
        NonFiniteLossError: the loss became NaN or infinite.
        Interrupted: a signal came; the state is saved.
    """
    run, engine, progress = session.run, session.engine, start.progress
    settings = run.clap.train
    schedule = together(lambda: plan(session))
    evaluator = together(lambda: _evaluator(session))
    batches = shuffle_captions(session) if settings.shuffle_captions else session.batches
    with (
        StopRequest(lambda number: _end_at_once(session, number)) as stop,
        TrainingLog(session, schedule, progress) as log,
    ):
        _introduce(session, start, schedule)
        engine.norm_wanted = True
        target = Target(settings.stop_at, progress)
        metrics: dict[str, float] = {}
        saved: SavedCheckpoint | None = None
        stopped_by = 0
        while not (schedule.is_done(progress.samples) or target.is_reached or stopped_by):
            number = schedule.accumulation_at(progress.samples)
            engine.set_accumulation_steps(number)
            log.begin_step()
            loss = engine.step(batches, log.timer)
            progress.step += 1
            progress.samples += number * schedule.samples_per_micro_step
            progress.epoch = schedule.epoch(progress.samples)
            log.end_step(loss)

            stopped_by = stop.agreed()
            is_last = schedule.is_done(progress.samples)
            to_evaluate = is_last or _is_due(progress.step, run.clap.evaluation.every_steps)
            to_save = is_last or _is_due(progress.step, run.clap.checkpoint.every_steps)
            if to_evaluate or to_save or stopped_by or _is_due(progress.step, settings.log_every_steps):
                log.write()
            metrics = {}
            if evaluator is not None and to_evaluate and not stopped_by:
                begun = time.monotonic()
                engine.share_statistics()
                metrics = evaluator.run(engine.model)
                target.look(metrics, log.train_s)
                progress.best |= {name: max(value, progress.best.get(name, value)) for name, value in metrics.items()}
                log.evaluated(metrics, time.monotonic() - begun)
            if to_save or stopped_by or target.is_reached:
                progress.train_s = log.train_s
                progress.data = _data_states(session)
                saved = start.checkpoints.save(engine, progress, metrics=metrics)
                log.saved(saved)
        _conclude(session, start, log, target)
    if stopped_by:
        _record_interruption(session, Interrupted(stopped_by), saved)
    if saved is not None and not saved.saved:
        raise AgreedError(f"trained to the end, but the last checkpoint could not be saved: {saved.problem}")


class Target:
    """`clap.train.stop_at`: evaluation metrics to reach, and the time it took.

    Args:
        wanted: metric → value to reach; empty for none.
        progress: keeps what was reached, for a run that goes on from a checkpoint.
    """

    def __init__(self, wanted: dict[str, float], progress: Progress) -> None:
        self._wanted = wanted
        self._progress = progress

    @property
    def is_reached(self) -> bool:
        return bool(self._wanted) and self._progress.extra.get("target") == self._wanted

    @property
    def time_s(self) -> float | None:
        """Seconds of training to the evaluation that reached it."""
        return self._progress.extra.get("time_to_target_s") if self.is_reached else None

    def look(self, metrics: dict[str, float], train_s: float) -> None:
        """Compare an evaluation with the target. Rank 0's clock counts."""
        if self._wanted and all(metrics[name] >= value for name, value in self._wanted.items()):
            self._progress.extra |= {"target": self._wanted, "time_to_target_s": train_s}


def plan(session: Session) -> Schedule:
    """The run's schedule. The length of an epoch is looked up only where epochs are wanted: the headers of all shards may have
    to be read for it. A collective.

    Raises:
        ValueError: on all ranks: epochs are wanted and can't be counted.
    """
    run, length = session.run, None
    if run.clap.train.epochs is not None:
        length = on_first(lambda: epoch_samples(run.clap.data))
    return Schedule.of(run, world_size=session.ranks.world_size, epoch_samples=length)


def shuffle_captions(session: Session) -> Iterator[Batch]:
    """The session's batches with captions moved on by a random number of clips: none keeps its own, and where batches are drawn
    at random, a caption says nothing of its clip."""
    generator = random.Random(f"seed {session.run.clap.seed}, rank {session.ranks.rank}")
    for batch in session.batches:
        distance = generator.randrange(1, max(2, len(batch)))
        input_ids, attention_mask = (ids.roll(distance, 0) for ids in (batch.input_ids, batch.attention_mask))
        shuffled = Batch(batch.waveforms, input_ids, attention_mask, num_tokens=batch.num_tokens)
        if batch.packed is not None:
            shuffled.pack()
        yield shuffled


def _evaluator(session: Session) -> Evaluator | None:
    run, data = session.run, session.run.clap.data
    settings = run.clap.evaluation
    if settings.retrieval is None and settings.zero_shot is None:
        return None
    # Imported here because runs without evaluation have no use for audio decoders and tokenizers.
    from clap_ds.evaluation.evaluator import Evaluator

    return Evaluator(
        settings,
        model_config=run.clap.preset(),
        tokenizer_name=settings.tokenizer or (data.tokenizer if isinstance(data, ShardData) else None),
        text_tokens=run.clap.text_tokens,
        micro_batch=settings.micro_batch or run.micro_batch,
        ranks=session.ranks,
        device=session.device,
    )


def _introduce(session: Session, start: TrainingStart, schedule: Schedule) -> None:
    """Say what is ahead: steps, and what checkpoints will cost."""
    run, progress = session.run, start.progress
    size, seconds = start.checkpoints.estimate(session.engine)
    if not session.ranks.is_first:
        return
    steps, every = schedule.steps_from(progress.samples), run.clap.checkpoint.every_steps
    number = (progress.step + steps) // every - progress.step // every if every else 1
    if steps:
        print(f"training to {schedule.samples:,} samples: {steps:,} steps", flush=True)
    else:
        print(f"nothing left to train: all of {schedule.samples:,} samples are through", flush=True)
    print(
        f"checkpoints: {size / 1e9:.3f} GB and about {seconds:.1f} s each, about {number}, in {start.checkpoints.path}",
        flush=True,
    )
    mismatch = schedule.mismatch(run.deepspeed.get("scheduler", {}), progress.step, progress.samples)
    if mismatch:
        print(f"warning: {mismatch}", flush=True)
    session.record.update_summary(
        target_samples=schedule.samples,
        planned_steps=progress.step + steps,
        epoch_samples=schedule.epoch_samples,
        checkpoint_estimate={"bytes": size, "seconds": seconds, "folder": str(start.checkpoints.path)},
    )


def _data_states(session: Session) -> list[dict[str, Any]]:
    states: list[Any] = [None] * session.ranks.world_size
    dist.all_gather_object(states, session.batches.state())
    return states


def _conclude(session: Session, start: TrainingStart, log: TrainingLog, target: Target) -> None:
    """Finish what goes on in the background, and sum up."""
    start.checkpoints.close()
    log.summarise(stop_at=session.run.clap.train.stop_at, time_to_target_s=target.time_s)
    if session.ranks.is_first:
        _draw_page(session.record.path)
    dist.barrier()


def _draw_page(run_directory: Path) -> None:
    """Curves of the run, where matplotlib is installed."""
    try:
        from clap_ds.analysis.plot_training import draw, read_training

        draw([read_training(run_directory)], run_directory / "run.png")
        print(f"curves: {run_directory / 'run.png'}", flush=True)
    except ImportError:
        print("no curves drawn: matplotlib is not installed (pip install 'clap-ds[analysis]')", flush=True)
    except (OSError, ValueError) as error:
        print(f"warning: no curves drawn: {error}", flush=True)


def _record_interruption(session: Session, stop: Interrupted, saved: SavedCheckpoint | None) -> None:
    """Say how to go on, record the state before any rank leaves, and leave.

    Raises:
        Interrupted: always.
    """
    assert saved is not None
    if session.ranks.is_first:
        session.record.update_summary(data=session.batches.statistics())
        lost = "" if saved.saved else f", which could not be saved: {saved.problem}"
        session.record.finish(stop.state, f"stopped by {stop} after step {saved.step}{lost}")
        place = "there" if saved.saved else "the last checkpoint that could"
        print(f"stopped by {stop} after step {saved.step}{lost}; the same command goes on from {place}", flush=True)
    dist.barrier()
    raise stop


def _end_at_once(session: Session, number: int) -> None:
    stop = Interrupted(number)
    session.record.finish(
        stop.state, f"stopped by a second signal, {stop}: what came after the last checkpoint is lost"
    )
    leave(128 + number)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
