"""Train a model: the loop of `clap-ds train`, and the end of a run."""

from __future__ import annotations

import shlex
import time
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from clap_ds.checkpoint.resume import load_pretrained, resume, setup_checkpointer
from clap_ds.checkpoint.train_state import ResumeOptions, SavedCheckpoint, TrainState
from clap_ds.config.schema import list_metrics
from clap_ds.config.settings import RunSettings
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import gather, raise_on_all_ranks, reduce_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.watchdog import ending
from clap_ds.engine.engine import ClapEngine
from clap_ds.metrics.profiler import StepProfiler
from clap_ds.metrics.terminal import run_title
from clap_ds.metrics.timers import StepTimer
from clap_ds.run import (
    StopSignal,
    join_ranks,
    open_run_dir,
    setup_dataloader,
    setup_engine,
    setup_model,
)
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.training.log import TrainLogger, advice_on_non_finite, log_run_start
from clap_ds.training.plan import TrainPlan
from clap_ds.training.stop_signal import StopRequest
from clap_ds.utils.errors import CollectiveUserError

if TYPE_CHECKING:
    from clap_ds.evaluation.evaluator import Evaluator


def train_run(run: RunSettings, ranks: Ranks, options: ResumeOptions) -> RunDirectory | None:
    """Train until the samples are consumed, the target metrics reached, or a signal arrives.

    Returns:
        The run's directory, on rank 0, if any step was taken.
    """
    clap = run.clap
    sizes = run.batch_sizes(ranks.world_size)
    signal = 0
    with (
        join_ranks(run, ranks) as device,
        open_run_dir(run, ranks, device) as record,
        setup_checkpointer(run, ranks, record.path) as checkpointer,
    ):
        model = setup_model(run, ranks, device)
        load_pretrained(clap.train.pretrained, model, checkpointer.tokenizer, options)
        engine = setup_engine(run, ranks, model, StepTimer(device))
        state = resume(checkpointer, engine, clap.train.resume, options, ranks, record)
        step_at_start = state.step
        with setup_dataloader(run, ranks, engine, state.data) as loader:
            compiled = engine.optimize_towers(loader, clap.model, clap.compile, ranks.local_rank)
            with raise_on_all_ranks():
                epoch_samples = loader.statistics().get("epoch_samples")
                plan = TrainPlan.from_settings(clap, sizes, epoch_samples, state.step)
            evaluator = setup_evaluator(run, ranks, engine, compiled.get("compiled"))
            if ranks.is_main_process:
                print(run_title(record.update_summary(compiled)), flush=True)
                log_run_start(plan, state, checkpointer.path, run.deepspeed)
            with (
                TrainLogger(record, checkpointer.path, engine, plan, state, ranks) as logger,
                StepProfiler(
                    clap.profile, engine.timer, record.path, ranks.rank, plan.profiled_steps
                ) as profiler,
                StopRequest() as stop_request,
                advice_on_non_finite(engine, checkpointer, logger),
            ):
                while not plan.is_done(state):
                    # With `batch_ramp`, the global batch grows by accumulation.
                    engine.set_accumulation_steps(plan.batch(state.samples) // sizes.micro_step)
                    skip_batches(loader, engine, state, options)
                    stop_request.ask(checkpointer.is_late())
                    logger.begin_step()
                    profiler.begin_step(state.step + 1)
                    # Before a log, DeepSpeed's timer waits for the device, as the log will.
                    is_logged = (state.step + 1) % plan.log_every == 0
                    loss = engine.step(loader, waits=is_logged)
                    plan.advance(state)
                    logger.end_step(loss)
                    profiler.end_step(state.step)
                    # Waiting for other ranks isn't this rank's own time.
                    with engine.timer.peer_wait():
                        signal, is_late = stop_request.wait()

                    due = plan.due(state, signal, is_late)
                    metrics = {}
                    if due.log:
                        loader.report_throughput(logger.log(), ranks.local_world_size)
                        logger.log_saves(checkpointer.poll())
                    if due.evaluate and evaluator is not None:
                        metrics = evaluate(evaluator, engine, plan, state, logger)
                        # It may have reached the target.
                        if plan.is_done(state):
                            due = due._replace(save=True, stop=True)
                    if due.save and engine.is_checkpointable(loss, is_last=due.stop and not signal):
                        state.prepare_save(gather(loader.state()), logger.train_s)
                        logger.log_saves(checkpointer.save(engine, state, metrics, wait=due.stop))
                    if due.stop:
                        break
                # From here on, the watchdog has no time limit.
                ending()
                checkpointer.close()
                logger.close()
            loader.record_statistics(record)
        stop_or_fail(record, ranks, state, signal, checkpointer.last)
        if not ranks.is_main_process or state.step == step_at_start:
            return None
        announce_end(run, plan, state, checkpointer.path)
        return record


def announce_end(run: RunSettings, plan: TrainPlan, state: TrainState, checkpoints: Path) -> None:
    """Print why the run ended, its length, and what to type next."""
    end = plan.describe_target(state) or "done"
    title = f"{end}: {state.samples:,} samples in {state.step:,} steps. Next:"
    print(title, *next_commands(run, checkpoints), sep="\n  ", flush=True)


def setup_evaluator(
    run: RunSettings, ranks: Ranks, engine: ClapEngine, compiled: dict[str, str | None] | None
) -> Evaluator | None:
    """Build the evaluator of `clap.evaluation`, if it has tasks. `compiled`: problems of the
    engine's compiled parts, to which evaluations' are added; None if they are uncompiled."""
    settings = run.clap.evaluation
    if settings.retrieval is None and settings.zero_shot is None:
        return None
    # It needs audio decoders and tokenizers, which training on synthetic data doesn't.
    from clap_ds.evaluation.evaluator import Evaluator

    evaluator = Evaluator(
        settings,
        model_config=engine.model.config,
        tokenizer_name=settings.tokenizer or getattr(run.clap.data, "tokenizer", None),
        context_length=run.clap.context_length,
        micro_batch=settings.batch_size or run.micro_batch,
        loss_kind=run.clap.loss.kind,
        ranks=ranks,
    )
    if compiled is not None:
        # A failure in the first evaluation would cost the steps before it.
        compiled["evaluation"] = evaluator.try_compiled(engine.model)
    return evaluator


def evaluate(
    evaluator: Evaluator,
    engine: ClapEngine,
    plan: TrainPlan,
    state: TrainState,
    logger: TrainLogger,
) -> dict[str, float]:
    """Evaluate the engine, and record the metrics, which are returned. A collective."""
    begin_s = time.monotonic()
    evaluation = evaluator.evaluate_engine(engine)
    time_s = time.monotonic() - begin_s
    # Different devices may differ in the last bit: all ranks use rank 0's.
    metrics = reduce_on_rank0(evaluation.metrics, itemgetter(0))
    state.update_best(metrics, plan.target_metrics, logger.train_s)
    logger.log_evaluation(evaluation, time_s)
    return metrics


def skip_batches(
    loader: BatchSource, engine: ClapEngine, state: TrainState, options: ResumeOptions
) -> None:
    """Skip the batches of all steps of `--skip_steps` before the first of them."""
    if options.skip_steps is None:
        return
    first_step, last_step = options.skip_steps
    if state.step + 1 != first_step:
        return
    num_steps = last_step - first_step + 1
    # A step takes a batch per micro-step.
    for _ in range(num_steps * engine.deepspeed.gradient_accumulation_steps()):
        next(loader)
    if dist.get_rank() == 0:
        print(f"skipped the batches of steps {first_step} to {last_step}", flush=True)


def stop_or_fail(
    record: RunDirectory,
    ranks: Ranks,
    state: TrainState,
    signal: int,
    last_save: SavedCheckpoint | None,
) -> None:
    """Record the signal that stopped the run. A collective.

    Raises:
        StopSignal: for a signal.
        CollectiveUserError: if the last checkpoint couldn't be saved.
    """
    # Rank 0 has recorded the run's results before any rank leaves.
    dist.barrier()
    if not signal:
        if last_save is not None and not last_save.saved:
            raise CollectiveUserError(
                "trained to the end, but the last checkpoint could not be saved:"
                f" {last_save.problem}"
            )
        return
    # Such a state isn't saved, so that the last save is of an earlier step.
    problem: str | None = "the loss isn't finite"
    if last_save is not None and last_save.step == state.step:
        problem = last_save.problem
    stop = StopSignal(signal)
    if ranks.is_main_process:
        message = f"stopped by {stop} after step {state.step}"
        if problem:
            message += f", which could not be saved: {problem}"
        record.finish(stop.state, message)
        print(f"{message}; the same command without --restart resumes", flush=True)
    # The state is recorded before any rank leaves.
    dist.barrier()
    raise stop


def next_commands(run: RunSettings, checkpoints: Path) -> list[str]:
    """Return commands that evaluate the trained model and export it, if transformers or open_clip
    has its sizes."""
    folder = shlex.quote(str(checkpoints))
    evaluation = "--retrieval SHARDS"
    if list_metrics(run.clap.evaluation):
        evaluation = f"--config {shlex.quote(str(run.path))}"
        evaluation += "".join(f" --set {shlex.quote(text)}" for text in run.assignments)
    # The run's own settings, if they have evaluation shards.
    commands = [f"clap-ds evaluate {folder} {evaluation}"]
    preset = run.clap.preset()
    # transformers' ClapModel has no other tower and pooling.
    if (preset.text.architecture, preset.text.pooling) == ("roberta", "cls_pooler"):
        commands.append(f"clap-ds export {folder} FOLDER")
    elif preset.text.hub_name and not preset.open_clip:
        commands.append(f"clap-ds export {folder} FOLDER --format open_clip")
    return commands
