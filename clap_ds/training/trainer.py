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
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.session import Interrupted, Session
from clap_ds.ranks.agreement import gather, together
from clap_ds.ranks.distributed import leave
from clap_ds.ranks.watch import ending
from clap_ds.training.batches import with_captions_compared
from clap_ds.training.log import TrainingLog
from clap_ds.training.messages import conclude, how_to_go_on, introduce
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
    log = TrainingLog(session, schedule, start)
    with StopRequest(lambda number: _end_at_once(session, start, number)) as stop:
        introduce(session, start, schedule)
        begun_at = start.progress.step
        try:
            stopped_by, saved = _run(session, start, schedule, evaluator, stop, log)
        except NonFiniteError as error:
            start.checkpoints.close()
            raise NonFiniteError(f"{error}. {how_to_go_on(session, start)}") from None
        ending()
        start.checkpoints.close()
        wanted = session.run.clap.train.stop_at
        over = start.progress.why_over(session.run)
        log.summarise(stop_at=wanted, time_to_target_s=start.progress.time_to(wanted), ended_early=over)
        if session.ranks.is_first and start.progress.step > begun_at:
            conclude(session, start, schedule)
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
    stopped_by, saved, to_save = 0, None, False
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
        to_save = to_save or is_last or _is_due(progress.step, clap.checkpoint.every_steps)
        if to_evaluate or to_save or stopped_by or _is_due(progress.step, settings.log_every_steps):
            log.write()
        metrics: dict[str, float] = {}
        if evaluator is not None and to_evaluate and not stopped_by:
            begun = time.monotonic()
            engine.share_statistics()
            metrics, chances = _evaluate(evaluator, engine)
            progress.note(metrics, session.run, log.train_s)
            log.evaluated(metrics, chances, time.monotonic() - begun)
        is_over = is_last or progress.why_over(session.run) is not None
        if to_save or stopped_by or is_over:
            if engine.is_lost(loss):  # what is saved now, would be resumed for ever
                engine.check_loss(at_once=is_over)
                saved = SavedCheckpoint(progress.step, time.time(), time.time(), problem="the loss isn't finite")
                continue
            progress.train_s = log.train_s
            progress.data = gather(session.batches.state())
            saved, to_save = start.checkpoints.save(engine, progress, metrics=metrics), False
            log.saved(saved)
    return stopped_by, saved


def _skip_batches(session: Session, start: TrainingStart, accumulation: int) -> None:
    """Leave out the batches of `--skip_steps`."""
    first, last = start.choices.skip_steps or (1, 0)
    for _ in range((last - first + 1) * accumulation):
        next(session.batches)
    if session.ranks.is_first:
        print(f"left out the batches of steps {first} to {last}", flush=True)


def _schedule(session: Session) -> Schedule:
    run = session.run
    length = session.batches.statistics().get("epoch_samples")
    return Schedule.of(run, world_size=session.ranks.world_size, epoch_samples=length)


def _evaluate(evaluator: "Evaluator", engine: ClapEngine) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics, and what chance would reach."""
    from clap_ds.evaluation.evaluator import NonFiniteEmbeddingsError

    try:
        found = evaluator.evaluate(engine.model)
        return gather((found.metrics, found.chances))[0]  # of a mixture of devices, the last bit may differ
    except NonFiniteEmbeddingsError as error:
        raise NonFiniteError(f"after step {engine.steps} {error}") from None


def _shuffle_captions(session: Session) -> Iterator[Batch]:
    """The session's batches with captions moved on by a random number of clips: none keeps its own, and where batches are drawn
    at random, a caption says nothing of its clip."""
    generator = random.Random(f"seed {session.run.clap.seed}, rank {session.ranks.rank}")
    for batch in session.batches:
        distance = generator.randrange(1, max(2, len(batch)))
        input_ids, attention_mask = (ids.roll(distance, 0) for ids in (batch.input_ids, batch.attention_mask))
        shuffled = Batch(batch.audio, input_ids, attention_mask, num_tokens=batch.num_tokens)
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
        loss_kind=run.clap.loss.kind,
        ranks=session.ranks,
        device=session.device,
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
