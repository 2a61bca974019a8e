"""Load pretrained weights, and resume from a run's newest checkpoint."""

import uuid

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.restore import tokenizer_problem
from clap_ds.checkpoint.train_state import ResumeOptions, TrainState
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import raise_on_all_ranks, rank, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.utils.errors import count_of


@raise_on_all_ranks()
def load_pretrained(
    path: str | None,
    model: ContrastiveModel,
    tokenizer: str | None,
    options: ResumeOptions = ResumeOptions(),
) -> None:
    """Load `clap.train.pretrained`, if set. A collective; raises ValueError if missing, or for
    another model or tokenizer."""
    if path is None:
        return
    try:
        weights = load_weights(path, model.config)
        weights.load_into(model)
        is_trusted = weights.trusts_tokenizer
        problem = tokenizer_problem(
            weights.tokenizer, tokenizer, model.config.text, is_trusted=is_trusted
        )
        if problem and not options.resume_weights_only:
            raise ValueError(f"{problem}. Set clap.data.tokenizer to {weights.tokenizer}")
    except ValueError as error:
        raise ValueError(f"clap.train.pretrained: {error}") from None
    if rank() == 0:
        print(f"initial weights: {weights.shown}", flush=True)


@raise_on_all_ranks()
def resume(
    checkpointer: Checkpointer,
    engine: ClapEngine,
    wanted: str,
    options: ResumeOptions,
    ranks: Ranks,
    record: RunDirectory,
) -> TrainState:
    """Resume from the newest checkpoint, or the one that `wanted` names. A collective; raises
    ValueError.

    Attempts of a job and reruns repeat the same command. Its --restart or path in
    `clap.train.resume` takes effect only once, as far as the run ids in checkpoints show.
    """
    attempt = ranks.job_folder
    has_path = wanted != "auto" and not options.restart
    run = (
        f"from {wanted}"
        if has_path
        else str(attempt.parent)
        if attempt
        else run_on_rank0(lambda: uuid.uuid4().hex)
    )
    is_repeated = has_path or (options.restart and attempt is not None and attempt.name != "0")
    has_begun = is_repeated and checkpointer.was_begun_by(run)
    checkpointer.run_id = run
    if options.restart and not has_begun:
        checkpointer.move_aside()
        return TrainState()
    try:
        path = checkpointer.find(wanted if has_path and not has_begun else None)
        if path is None:
            return TrainState()
        state = checkpointer.load(path, engine, resume_weights_only=options.resume_weights_only)
    except ValueError as error:
        raise ValueError(f"clap.train.resume: {error}") from None
    if has_path and not has_begun:
        checkpointer.run_id = run
    if ranks.is_main_process:
        record.update_summary(resumed_from=str(path), resumed_at_step=state.step)
        before = len(state.data)
        now = ranks.world_size
        on = "" if now == before else f", on {count_of(now, 'rank')} instead of {before}"
        print(f"resuming from {path}: step {state.step}, {state.samples:,} samples{on}", flush=True)
    return state


def skip_batches(
    loader: BatchSource, state: TrainState, options: ResumeOptions, per_step: int
) -> None:
    """Before the first step of `--skip_steps`, skip all its batches; `per_step` are one step's."""
    first, last = options.skip_steps or (0, 0)
    if state.step + 1 == first:
        for _ in range((last - first + 1) * per_step):
            next(loader)
        if rank() == 0:
            print(f"skipped the batches of steps {first} to {last}", flush=True)
