"""Train a CLAP model on audio–caption data.

Examples:
    clap-ds train --config my_run.json   one rank
    deepspeed clap_ds/train.py --deepspeed_config my_run.json   all GPUs of this host
    deepspeed --hostfile H clap_ds/train.py --deepspeed_config my_run.json --set optimizer.params.lr=1e-4

Resumes from the run's newest checkpoint, if any. On SIGTERM, SIGUSR1 or SIGHUP it finishes the
current or next step, saves and exits. Several ranks need `deepspeed` or torchrun.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if __package__ in (None, ""):
    # Launched by path: sys.path holds the package's folder, not its parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

# Importing torch and DeepSpeed takes seconds: functions import what needs them, after settings are
# validated.
from clap_ds.checkpoint.train_state import ResumeOptions, SavedCheckpoint, TrainState
from clap_ds.config.arguments import add_checkpoint_choices, locate
from clap_ds.config.schema import best_metric, names
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import (
    Ranks,
    announce_accelerator,
    prepare_debugging,
    run_arguments,
    run_command,
)
from clap_ds.training.plan import TrainPlan, problems_for_training
from clap_ds.utils.errors import CollectiveUserError, UserError

if TYPE_CHECKING:
    import torch

    from clap_ds.checkpoint.manager import Checkpointer
    from clap_ds.engine.engine import ClapEngine
    from clap_ds.evaluation.evaluator import Evaluator
    from clap_ds.run_records.run_dir import RunDirectory


def run_rank(ranks: Ranks, argv: Sequence[str] | None) -> None:
    parser = run_arguments(__doc__)
    add_checkpoint_choices(parser)
    arguments = parser.parse_args(argv)
    run = load_run(arguments.config, ranks.world_size, arguments.set)
    if problems := problems_for_training(run.clap, run.deepspeed, ranks.world_size):
        raise UserError(
            "\n".join(locate(problem, run.path, run.assignments) for problem in problems)
        )
    prepare_debugging(run.clap.debug)
    announce_accelerator(ranks)
    from clap_ds.run import join_ranks

    options = {name: getattr(arguments, name) for name in ResumeOptions.__annotations__}
    with join_ranks(run, ranks) as device:
        train_run(run, ranks, device, ResumeOptions(**options))


def train_run(run: RunSettings, ranks: Ranks, device: torch.device, options: ResumeOptions) -> None:
    """Train until the samples are consumed, the target metrics reached, or a signal arrives."""
    from clap_ds.checkpoint.resume import load_pretrained, resume, skip_batches
    from clap_ds.distributed.collectives import gather, raise_on_all_ranks
    from clap_ds.distributed.watchdog import ending
    from clap_ds.metrics.tensorboard import Scalars
    from clap_ds.metrics.terminal import run_title
    from clap_ds.metrics.timers import StepTimer
    from clap_ds.run import open_run_dir, setup_dataloader, setup_engine, setup_model
    from clap_ds.training.evaluate import evaluate
    from clap_ds.training.log import TrainLogger, advice_on_non_finite, log_run_start
    from clap_ds.training.stop_signal import StopRequest

    clap = run.clap
    sizes = run.batch_sizes(ranks.world_size)
    signal = 0
    with (
        open_run_dir(run, ranks, device) as record,
        open_checkpointer(run, ranks, record.path) as checkpointer,
    ):
        model = setup_model(run, ranks, device)
        load_pretrained(clap.train.pretrained, model, checkpointer.tokenizer, options)
        engine = setup_engine(run, ranks, model, StepTimer(device))
        state = resume(checkpointer, engine, clap.train.resume, options, ranks, record)
        begun_at = state.step
        with setup_dataloader(run, ranks, engine, state.data_of(ranks.rank)) as loader:
            chosen = engine.optimize_towers(loader, clap.model, clap.compile)
            with raise_on_all_ranks():
                of_run = clap.train, clap.evaluation, clap.checkpoint, sizes
                plan = TrainPlan.of(*of_run, loader.statistics().get("epoch_samples"))
            evaluator = build_evaluator(run, ranks, engine)
            scalars = Scalars(engine, checkpointer.path, clap.train.histogram_every_steps)
            logger = TrainLogger(
                record, engine, loader, scalars, plan, state, ranks, checkpointer.path
            )
            if ranks.is_main_process:
                print(run_title(record.update_summary(chosen)), flush=True)
                log_run_start(plan, state, checkpointer.path, run.deepspeed)
            with (
                scalars,
                StopRequest() as signals,
                advice_on_non_finite(engine, checkpointer, logger),
            ):
                while not (signal or plan.is_done(state)):
                    engine.set_accumulation_steps(plan.batch(state.samples) // sizes.micro_step)
                    skip_batches(
                        loader, state, options, engine.deepspeed.gradient_accumulation_steps()
                    )
                    signals.ask(checkpointer.is_late())
                    logger.begin_step()
                    loss = engine.step(loader, waits=(state.step + 1) % plan.log_every == 0)
                    plan.advance(state)
                    logger.end_step(loss)
                    with engine.timer.peer_wait():
                        signal, is_late = signals.wait()
                    due = plan.due(state, signal, is_late)
                    metrics = {}
                    if due.log:
                        logger.write()
                        logger.saved(*checkpointer.poll())
                    if due.evaluate and evaluator is not None:
                        metrics = logger.evaluated(*evaluate(evaluator, engine))
                        due = plan.due(state, signal, is_late)  # the target may be reached
                    if due.save and engine.may_be_saved(loss, is_last=due.stop and not signal):
                        state.train_s = logger.train_s
                        state.data = gather(loader.state())
                        state.saved_step = state.step
                        logger.saved(*checkpointer.save(engine, state, metrics, wait=due.stop))
                ending()
                checkpointer.close()
                logger.close()
            loader.record_statistics(record)
        stop_or_fail(record, ranks, state, signal, checkpointer.last)
        if ranks.is_main_process and state.step > begun_at:
            print_end(run, record, state)


def open_checkpointer(run: RunSettings, ranks: Ranks, logs: Path) -> Checkpointer:
    from clap_ds.checkpoint.manager import Checkpointer
    from clap_ds.checkpoint.remote import try_target
    from clap_ds.checkpoint.restore import describe_run, find_checkpoint_folder
    from clap_ds.distributed.collectives import raise_on_all_ranks, run_on_rank0

    clap = run.clap
    with raise_on_all_ranks():
        config = run_on_rank0(lambda: describe_run(run))
        run.checkpoint_folder = Path(run_on_rank0(lambda: find_checkpoint_folder(run, config)))
        if (url := clap.checkpoint.remote_sync) is not None:
            run_on_rank0(lambda: try_target(url))
    settings = clap.checkpoint.model_copy(
        update={"best_metric": best_metric(clap.checkpoint, clap.evaluation)}
    )
    parts: Any = {
        "job": ranks.job_folder and ranks.job_folder.parent,
        "logs": logs,
        "config": config,
    }
    return Checkpointer(
        run.checkpoint_folder, settings, tokenizer=getattr(clap.data, "tokenizer", None), **parts
    )


def build_evaluator(run: RunSettings, ranks: Ranks, engine: ClapEngine) -> Evaluator | None:
    """Return the evaluator of `clap.evaluation`, if it has tasks."""
    settings = run.clap.evaluation
    if settings.retrieval is None and settings.zero_shot is None:
        return None
    from clap_ds.evaluation.evaluator import Evaluator  # needs audio decoders and tokenizers

    return Evaluator(
        settings,
        model_config=engine.model.config,
        tokenizer_name=settings.tokenizer or getattr(run.clap.data, "tokenizer", None),
        context_length=run.clap.context_length,
        micro_batch=settings.batch_size or run.micro_batch,
        loss_kind=run.clap.loss.kind,
        ranks=ranks,
    )


def stop_or_fail(
    record: RunDirectory,
    ranks: Ranks,
    state: TrainState,
    signal: int,
    saved: SavedCheckpoint | None,
) -> None:
    """Record the signal that stopped the run and raise StopSignal. Raises CollectiveUserError if
    the last checkpoint couldn't be saved. A collective."""
    import torch.distributed as dist

    from clap_ds.run import StopSignal

    dist.barrier()  # rank 0 has recorded the run's results
    if not signal:
        if saved is not None and not saved.saved:
            raise CollectiveUserError(
                f"trained to the end, but the last checkpoint could not be saved: {saved.problem}"
            )
        return
    problem = (
        saved.problem if saved is not None and saved.step == state.step else "the loss isn't finite"
    )
    stop = StopSignal(signal)
    lost = f", which could not be saved: {problem}" if problem else ""
    if ranks.is_main_process:
        said = f"stopped by {stop} after step {state.step}{lost}"
        record.finish(stop.state, said)
        print(f"{said}; the same command without --restart resumes", flush=True)
    dist.barrier()  # the state is recorded before any rank leaves
    raise stop


def next_commands(run: RunSettings) -> list[str]:
    """Return commands that evaluate the trained model and export it, if transformers or open_clip
    has its sizes."""
    folder, path = (shlex.quote(str(each)) for each in (run.checkpoint_folder, run.path))
    changes = "".join(f" --set {shlex.quote(text)}" for text in run.assignments)
    evaluation = f"--config {path}{changes}" if names(run.clap.evaluation) else "--retrieval SHARDS"
    commands = [f"clap-ds evaluate {folder} {evaluation}"]
    preset = run.clap.preset()
    if preset.text.pooling == "cls_pooler":
        commands.append(f"clap-ds export {folder} FOLDER")
    elif preset.text.hub_name and not preset.open_clip:
        commands.append(f"clap-ds export {folder} FOLDER --format open_clip")
    return commands


def print_end(run: RunSettings, record: RunDirectory, state: TrainState) -> None:
    """Print what was trained, what to do next, and warnings; draw the run's curves."""
    end = state.reached(run.clap.train.target_metrics) or "done"
    print(
        f"{end}: {state.samples:,} samples in {state.step:,} steps. Next:",
        *next_commands(run),
        sep="\n  ",
        flush=True,
    )
    try:
        from clap_ds.analysis.plot_run import draw_runs

        (record.path / "run.png").unlink(missing_ok=True)  # matplotlib would follow a link
        draw_runs([record.path], record.path / "run.png")
        print(f"curves: {record.path / 'run.png'}", flush=True)
    except (OSError, UserError) as error:
        print(f"warning: curves not drawn: {error}", flush=True)
    for text in record.summary().get("warnings", []):
        print(f"warning: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run this rank of the command and exit."""
    run_command(lambda ranks: run_rank(ranks, argv))


if __name__ == "__main__":
    main()
