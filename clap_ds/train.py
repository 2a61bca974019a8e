"""Train a CLAP model on audio–caption data.

    deepspeed [--hostfile H] clap_ds/train.py --deepspeed_config my_run.json

Resumes from the run's newest checkpoint, if any. On SIGTERM, SIGUSR1 or SIGHUP it finishes the current or next step,
saves and exits. torchrun also works, as does plain python with one rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    # Launched by path: sys.path holds the package's folder, not its parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import add_checkpoint_choices
from clap_ds.config.errors import UserError
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import (
    Ranks,
    check_hostfile,
    choose_accelerator,
    prepare_debugging,
    run_arguments,
    run_command,
)
from clap_ds.training.checks import problems_for_training


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = run_arguments("clap_ds/train.py", (__doc__ or "").splitlines()[0])
    add_checkpoint_choices(parser)
    return parser.parse_args(argv)


def main(ranks: Ranks) -> None:
    arguments = parse_arguments()
    run = load_run(arguments.deepspeed_config, ranks.world_size)
    if problems := problems_for_training(run, ranks.world_size):
        raise UserError("\n".join(f"{run.path}: {problem}" for problem in problems))
    if arguments.hostfile:
        ranks = check_hostfile(arguments.hostfile, ranks)
    prepare_debugging(run.clap.debug)
    choose_accelerator()
    train_run(run, ranks, arguments)


def train_run(run: RunSettings, ranks: Ranks, arguments: argparse.Namespace) -> None:
    """Run a validated configuration."""
    # Importing torch and DeepSpeed takes seconds: validate first.
    import torch

    from clap_ds.distributed.collectives import raise_on_all_ranks
    from clap_ds.engine.factory import build_model, fetch_from_hub
    from clap_ds.engine.session import build_engine, init_process_group, open_run_dir, train_session
    from clap_ds.training.remote_sync import try_target
    from clap_ds.training.resume import ResumeOptions, load_pretrained, opened_checkpoints, resume
    from clap_ds.training.trainer import train

    choices = ResumeOptions(**{name: getattr(arguments, name) for name in ResumeOptions.__annotations__})
    device = init_process_group(run, ranks)
    with open_run_dir(run, ranks, device) as record:
        with raise_on_all_ranks():
            fetch_from_hub(run, ranks)
            try_target(run.clap.checkpoint.remote_sync)
        with raise_on_all_ranks():
            torch.manual_seed(run.clap.seed)
            model = build_model(run, device)
            load_pretrained(run, model, resume_weights_only=choices.resume_weights_only)
        engine = build_engine(run, model, ranks, device, record)
        with opened_checkpoints(run, ranks) as checkpoints:
            progress = resume(run, ranks, engine, checkpoints, record, choices)
            begun_at, state = progress.step, progress.data_of(ranks.rank)
            with train_session(run, ranks, record, engine, data_state=state, folder=checkpoints.path) as session:
                train(session, checkpoints, progress, choices)
            if ranks.is_main_process and progress.step > begun_at:
                draw(record.path)
                for text in record.summary().get("warnings", []):
                    print(f"warning: {text}", flush=True)


def draw(directory: Path) -> None:
    """Draw the run's curves if matplotlib is installed."""
    try:
        from clap_ds.analysis.plot_run import draw_runs

        (directory / "run.png").unlink(missing_ok=True)  # matplotlib would follow a link
        draw_runs([directory], directory / "run.png")
        print(f"curves: {directory / 'run.png'}", flush=True)
    except (OSError, UserError) as error:
        print(f"warning: curves not drawn: {error}", flush=True)


def command() -> None:
    """Run the console command `clap-train`."""
    run_command(main)


if __name__ == "__main__":
    command()
