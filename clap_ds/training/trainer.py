"""The training loop: steps, evaluations and checkpoints until all samples are consumed or a signal arrives."""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist

from clap_ds.config.errors import CollectiveUserError
from clap_ds.config.metrics import TRAIN_LOSS
from clap_ds.config.schema import ShardData
from clap_ds.distributed.collectives import gather, raise_on_all_ranks, run_on_rank0
from clap_ds.distributed.watchdog import ending
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.exit_handling import NonFiniteError, StopSignal
from clap_ds.engine.session import Session
from clap_ds.run_records.timers import peer_wait
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.log import TrainingLog
from clap_ds.training.messages import how_to_go_on, log_run_end, log_run_start
from clap_ds.training.resume import ResumeOptions
from clap_ds.training.signal_handler import StopRequest
from clap_ds.training.train_state import SavedCheckpoint, Schedule, TrainingProgress

if TYPE_CHECKING:
    from clap_ds.evaluation.evaluator import Evaluator


def train(session: Session, checkpoints: CheckpointFolder, progress: TrainingProgress, choices: ResumeOptions) -> None:
    """Train until `clap.train` is fulfilled.

    Raises:
        CollectiveUserError: evaluation or epochs aren't possible with these settings, or the last checkpoint can't be saved.
        NonFiniteError: loss, gradient or weights became NaN or infinite; the message has advice.
        Interrupted: a signal arrived; the state is saved.
    """
    run, begun_at = session.run, progress.step
    with raise_on_all_ranks():
        length = session.batches.statistics().get("epoch_samples")
        schedule = Schedule.of(run, world_size=session.ranks.world_size, epoch_samples=length)
    with raise_on_all_ranks():
        evaluator = _evaluator(session)
    log = TrainingLog(session, schedule, progress, checkpoints.path)
    with StopRequest() as stop:
        log_run_start(session, checkpoints, progress, schedule)
        try:
            stopped_by, saved = _run(session, checkpoints, progress, schedule, evaluator, stop, log, choices)
        except NonFiniteError as error:
            log.saved(checkpoints.poll(None))
            checkpoints.close()
            raise NonFiniteError(f"{error}. {how_to_go_on(checkpoints, session.engine.steps)}") from None
        ending()
        checkpoints.close()
        wanted = run.clap.train.target_metrics
        log.close(
            target_metrics=wanted, time_to_target_s=progress.time_to(wanted), stop_reason=progress.reached(wanted)
        )
        if session.ranks.is_main_process and progress.step > begun_at:
            log_run_end(session, progress, schedule)
        dist.barrier()
    if stopped_by:
        assert saved is not None
        stop_signal, lost = (
            StopSignal(stopped_by),
            "" if saved.saved else f", which could not be saved: {saved.problem}",
        )
        said = f"stopped by {stop_signal} after step {saved.step}{lost}"
        session.record_data()
        if session.ranks.is_main_process:
            session.record.finish(stop_signal.state, said)
            print(f"{said}; the same command without --restart resumes", flush=True)
        dist.barrier()  # the state is recorded before any rank leaves
        raise stop_signal
    if saved is not None and not saved.saved:
        raise CollectiveUserError(f"trained to the end, but the last checkpoint could not be saved: {saved.problem}")


def _run(
    session: Session,
    checkpoints: CheckpointFolder,
    progress: TrainingProgress,
    schedule: Schedule,
    evaluator: "Evaluator | None",
    stop: StopRequest,
    log: TrainingLog,
    choices: ResumeOptions,
) -> tuple[int, SavedCheckpoint | None]:
    """Run the loop. Return the signal that stopped it, or 0, and the result of the last save."""
    clap, engine = session.run.clap, session.engine
    first_skipped, last_skipped = choices.skip_steps or (0, 0)
    wanted = clap.train.target_metrics
    engine.norm_wanted = True
    stopped_by, saved, to_save = 0, None, False
    while not (schedule.is_done(progress.samples) or progress.reached(wanted) or stopped_by):
        if progress.step + 1 == first_skipped:
            for _ in range((last_skipped - first_skipped + 1) * session.run.gradient_accumulation_steps):
                next(session.batches)
            if session.ranks.is_main_process:
                print(f"skipped the batches of steps {first_skipped} to {last_skipped}", flush=True)
        stop.ask()
        loss = engine.step(session.batches, log.begin_step())
        progress.step += 1
        progress.samples += schedule.samples_per_step
        progress.epoch = schedule.epoch(progress.samples)
        log.end_step(loss)
        with peer_wait():
            stopped_by = stop.wait()
        is_last = schedule.is_done(progress.samples)
        to_evaluate = is_last or _is_due(progress.step, clap.evaluation.every_steps)
        to_save = to_save or is_last or _is_due(progress.step, clap.checkpoint.every_steps)
        if to_evaluate or to_save or stopped_by or _is_due(progress.step, clap.train.log_every_steps):
            log.write()
            log.saved(checkpoints.poll())
        metrics: dict[str, float] = {}
        if evaluator is not None and to_evaluate and not stopped_by:
            begun = time.monotonic()
            metrics, chances = _evaluate(evaluator, engine)
            progress.note(metrics, wanted, log.train_s)
            log.evaluated(metrics, chances, time.monotonic() - begun)
        is_over = is_last or progress.reached(wanted) is not None
        if to_save or stopped_by or is_over:
            if engine.loss_not_finite(loss):  # a saved non-finite state would be resumed forever
                engine.check_loss(at_once=is_over)
                saved = SavedCheckpoint(progress.step, time.time(), time.time(), problem="the loss isn't finite")
                continue
            progress.train_s = log.train_s
            progress.data = gather(session.batches.state())
            log.saved(checkpoints.finish())  # the previous save, usually complete
            metrics, to_save = metrics | {TRAIN_LOSS: log.last_steps.loss}, False
            if clap.checkpoint.async_save and not (stopped_by or is_over):
                checkpoints.start_saving(engine, progress, metrics=metrics)
            else:
                saved = checkpoints.save(engine, progress, metrics=metrics)
                log.saved(saved)
    return stopped_by, saved


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _evaluate(evaluator: "Evaluator", engine: ClapEngine) -> tuple[dict[str, float], dict[str, float]]:
    """Return metrics and chance levels, of the averaged weights if there are any."""
    from clap_ds.evaluation.evaluator import NonFiniteEmbeddingsError

    engine.share_statistics()
    try:
        with engine.average.in_place() if engine.average is not None else nullcontext():
            found = evaluator.evaluate(engine.model)
        return run_on_rank0(lambda: (found.metrics, found.chances))  # different devices may differ in the last bit
    except NonFiniteEmbeddingsError as error:
        raise NonFiniteError(f"after step {engine.steps} {error}") from None


def _evaluator(session: Session) -> "Evaluator | None":
    run, data = session.run, session.run.clap.data
    settings = run.clap.evaluation
    if settings.retrieval is None and settings.zero_shot is None:
        return None
    # Imported here because runs without evaluation need no audio decoders and tokenizers.
    from clap_ds.evaluation.evaluator import Evaluator

    return Evaluator(
        settings,
        model_config=run.clap.preset(),
        tokenizer_name=settings.tokenizer or (data.tokenizer if isinstance(data, ShardData) else None),
        context_length=run.clap.context_length,
        micro_batch=settings.batch_size or run.micro_batch,
        loss_kind=run.clap.loss.kind,
        ranks=session.ranks,
    )
