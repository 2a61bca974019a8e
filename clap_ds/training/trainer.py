"""The training loop: steps, evaluations and checkpoints until the samples are through, a target is reached or a signal comes.

Ranks, model, data and engine are the session's, what a step is the engine's. What a run starts from is `start`'s, its account
`log`'s.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from clap_ds.config.errors import AgreedError
from clap_ds.config.sections import ShardData
from clap_ds.data.batch import Batch
from clap_ds.data.shard_manifest import epoch_samples
from clap_ds.dist.agreement import gather, on_first, together
from clap_ds.dist.distributed import leave
from clap_ds.dist.progress import ending
from clap_ds.engine.engine import NonFiniteError
from clap_ds.engine.session import Interrupted, Session
from clap_ds.training.batches import too_few_items, with_captions_compared
from clap_ds.training.log import TrainingLog
from clap_ds.training.schedule import SavedCheckpoint, Schedule
from clap_ds.training.start import TrainingStart
from clap_ds.training.stop import StopRequest

if TYPE_CHECKING:
    from clap_ds.evaluation.evaluator import Evaluator


def train(session: Session, start: TrainingStart, draw: Callable[[Path], None] = lambda directory: None) -> None:
    """Train until `clap.train` is fulfilled.

    Args:
        draw: called on rank 0 at the end, to draw a picture of the run from its directory.

    Raises:
        AgreedError: evaluation or epochs aren't possible as the settings want them, or the last checkpoint can't be saved.
        NonFiniteError: loss, gradient or weights became NaN or infinite; says how to go on.
        Interrupted: a signal came; the state is saved.
    """
    schedule = together(lambda: _schedule(session))
    evaluator = together(lambda: _evaluator(session))
    with (
        StopRequest(lambda number: _end_at_once(session, start, number)) as stop,
        TrainingLog(session, schedule, start) as log,
    ):
        _introduce(session, start, schedule)
        try:
            stopped_by, saved = _run(session, start, schedule, evaluator, stop, log)
        except NonFiniteError as error:
            start.checkpoints.close()
            raise NonFiniteError(f"{error}. {_how_to_go_on(session, start)}") from None
        ending()
        start.checkpoints.close()
        wanted = session.run.clap.train.stop_at
        over = start.progress.why_over(session.run)
        log.summarise(stop_at=wanted, time_to_target_s=start.progress.time_to(wanted), ended_early=over)
        if session.ranks.is_first:
            _conclude(session, start, schedule)
            draw(session.record.path)
        dist.barrier()
    if stopped_by:
        assert saved is not None
        _record_interruption(session, start, Interrupted(stopped_by), saved)
    if saved is not None and not saved.saved:
        raise AgreedError(f"trained to the end, but the last checkpoint could not be saved: {saved.problem}")


def _run(
    session: Session,
    start: TrainingStart,
    schedule: Schedule,
    evaluator: "Evaluator | None",
    stop: StopRequest,
    log: TrainingLog,
) -> tuple[int, SavedCheckpoint | None]:
    """Step to the end: the number of the signal that came before, or 0, and what came of the last checkpoint."""
    clap, engine, progress = session.run.clap, session.engine, start.progress
    settings = clap.train
    batches = _shuffle_captions(session) if settings.shuffle_captions else session.batches
    batches = with_captions_compared(batches, session, schedule, progress.samples)
    engine.norm_wanted = True
    stopped_by, saved = 0, None
    while not (schedule.is_done(progress.samples) or progress.why_over(session.run) or stopped_by):
        number = schedule.accumulation_at(progress.samples)
        if start.choices.skip_steps is not None and progress.step + 1 == start.choices.skip_steps[0]:
            _skip_batches(session, start, number)
        engine.set_accumulation_steps(number)
        log.begin_step()
        loss = engine.step(batches, log.timer)
        progress.step += 1
        progress.samples += number * schedule.samples_per_micro_step
        progress.epoch = schedule.epoch(progress.samples)
        log.end_step(loss)

        stopped_by = stop.agreed()
        is_last = schedule.is_done(progress.samples)
        to_evaluate = is_last or _is_due(progress.step, clap.evaluation.every_steps)
        to_save = is_last or _is_due(progress.step, clap.checkpoint.every_steps)
        if to_evaluate or to_save or stopped_by or _is_due(progress.step, settings.log_every_steps):
            log.write()
        metrics: dict[str, float] = {}
        if evaluator is not None and to_evaluate and not stopped_by:
            begun = time.monotonic()
            engine.share_statistics()
            metrics = gather(evaluator.run(engine.model))[0]  # of a mixture of devices, the last bit may differ
            progress.note(metrics, session.run, log.train_s)
            log.evaluated(metrics, time.monotonic() - begun)
        if to_save or stopped_by or progress.why_over(session.run):
            progress.train_s = log.train_s
            progress.data = gather(session.batches.state())
            saved = start.checkpoints.save(engine, progress, metrics=metrics)
            log.saved(saved)
    return stopped_by, saved


def _skip_batches(session: Session, start: TrainingStart, accumulation: int) -> None:
    """Leave out the batches of `--skip_steps`."""
    first, last = start.choices.skip_steps or (1, 0)
    for _ in range((last - first + 1) * accumulation):
        next(session.batches)
    if session.ranks.is_first:
        print(f"left out the batches of steps {first} to {last}", flush=True)


def _how_to_go_on(session: Session, start: TrainingStart) -> str:
    """After an error of numbers. A collective."""
    newest, step = on_first(start.checkpoints.newest_step), session.engine.steps
    if newest is None:
        again = "Nothing has been saved: the same command begins anew"
    else:
        again = f"Nothing of it is saved: {start.same_command} goes on from step {newest}"
    first = (newest or 0) + 1
    return (
        f"{again}. If that ends alike, leave out the batches (--skip_steps {first}-{max(first, step)}), take a lower learning"
        " rate (optimizer.params.lr), a longer warm-up or gradient_clipping"
    )


def _schedule(session: Session) -> Schedule:
    run = session.run
    # The headers of all shards may have to be read for the length of an epoch.
    length = None if run.clap.train.epochs is None else on_first(lambda: epoch_samples(run.clap.data))
    return Schedule.of(run, world_size=session.ranks.world_size, epoch_samples=length)


def _shuffle_captions(session: Session) -> Iterator[Batch]:
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


def _evaluator(session: Session) -> "Evaluator | None":
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
    number, folder = (progress.step + steps) // every - progress.step // every if every else 1, start.checkpoints.path
    if steps:
        print(f"training to {schedule.samples:,} samples: {steps:,} steps", flush=True)
    else:
        print(f"nothing left to train: all of {schedule.samples:,} samples are through", flush=True)
    most = start.checkpoints.most
    print(
        f"checkpoints: {size / 1e9:.3f} GB and about {seconds:.1f} s each, about {number}, at most {most} at a time"
        f" ({most * size / 1e9:.3f} GB), in {folder}",
        flush=True,
    )
    if (skipped := start.choices.skip_steps) is not None and skipped[0] <= progress.step:
        print(
            f"--skip_steps {skipped[0]}-{skipped[1]}: nothing to leave out, the run is at step {progress.step}",
            flush=True,
        )
    mismatch = schedule.mismatch(run.deepspeed.get("scheduler", {}), progress.step, progress.samples)
    for warning in filter(None, (mismatch, too_few_items(session, schedule))):
        print(f"warning: {warning}", flush=True)
    session.record.update_summary(
        target_samples=schedule.samples,
        planned_steps=progress.step + steps,
        epoch_samples=schedule.epoch_samples,
        checkpoint_estimate={"bytes": size, "seconds": seconds, "folder": str(folder)},
    )


def _conclude(session: Session, start: TrainingStart, schedule: Schedule) -> None:
    """Say what ended the run, what was trained, and what can be done with it."""
    train, progress, folder = session.run.clap.train, start.progress, start.checkpoints.path
    if why := progress.why_over(session.run):
        print(why, flush=True)
    elif not schedule.is_done(progress.samples):
        return
    trained = " and ".join(tower for tower in ("audio", "text") if tower not in train.freeze)
    print(
        f"trained {trained} on {progress.samples:,} samples in {progress.step:,} steps. To evaluate and to export:\n"
        f"  python clap_ds/evaluate.py {folder} --retrieval 'SHARDS'\n"
        f"  python -m clap_ds.weights.export {folder} FOLDER",
        flush=True,
    )


def _record_interruption(session: Session, start: TrainingStart, stop: Interrupted, saved: SavedCheckpoint) -> NoReturn:
    """Say how to resume, record the state before any rank leaves, and raise `Interrupted`."""
    if session.ranks.is_first:
        session.record.update_summary(data=session.batches.statistics())
        lost = "" if saved.saved else f", which could not be saved: {saved.problem}"
        session.record.finish(stop.state, f"stopped by {stop} after step {saved.step}{lost}")
        place = "there" if saved.saved else "the last checkpoint that could be"
        print(f"stopped by {stop} after step {saved.step}{lost}; {start.same_command} resumes from {place}", flush=True)
    dist.barrier()
    raise stop


def _end_at_once(session: Session, start: TrainingStart, number: int) -> None:
    stop, lost = Interrupted(number), "what came after the last checkpoint is lost"
    session.record.finish(stop.state, f"stopped by a second signal, {stop}: {lost}")
    start.close()
    leave(128 + number)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
