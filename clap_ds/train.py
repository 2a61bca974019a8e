"""Command: train a CLAP model on audio–caption data.

    deepspeed [--hostfile H] clap_ds/train.py --deepspeed_config my_run.json

Resumes from the newest checkpoint of the same run if there is one; options say what else to do with the checkpoints that are
there. Also runs under torchrun and, as a single rank, under plain
python. SIGTERM and SIGUSR1 finish the step under way, save and exit; the same command then resumes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    # A launcher starts this file by its path, which puts the package's folder, not its parent, on the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import add_checkpoint_choices, check_checkpoint_choices
from clap_ds.config.errors import UserError
from clap_ds.ranks.distributed import Ranks, check_hostfile, choose_accelerator, run_arguments, run_command


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = run_arguments("clap_ds/train.py", (__doc__ or "").splitlines()[0])
    add_checkpoint_choices(parser)
    arguments = parser.parse_args(argv)
    check_checkpoint_choices(parser, arguments)
    return arguments


def main(ranks: Ranks) -> None:
    arguments = parse_arguments()
    from clap_ds.config.settings import load_run
    from clap_ds.training.checks import problems_for_training

    run = load_run(arguments.deepspeed_config, ranks.world_size)
    problems = problems_for_training(run, ranks.world_size)
    if problems:
        raise UserError("\n".join(f"{run.path}: {problem}" for problem in problems))
    if arguments.hostfile:
        ranks = check_hostfile(arguments.hostfile, ranks)

    # Loading torch and DeepSpeed takes seconds: only for a run that can start.
    choose_accelerator()
    from clap_ds.engine.session import open_session
    from clap_ds.training.start import Choices, TrainingStart
    from clap_ds.training.trainer import train

    choices = {name: getattr(arguments, name) for name in ("restart", "from_weights", "accept_changes", "skip_steps")}
    start = TrainingStart(run, ranks, Choices(**choices))
    with open_session(run, ranks, start) as session:
        train(session, start, _draw)


def _draw(directory: Path) -> None:
    """Curves of the run, where matplotlib is installed."""
    try:
        from clap_ds.analysis.plot_run import draw_runs

        draw_runs([directory], directory / "run.png")
        print(f"curves: {directory / 'run.png'}", flush=True)
    except (OSError, UserError) as error:
        print(f"warning: no curves drawn: {error}", flush=True)


def command() -> None:
    """Console command `clap-train`."""
    run_command(main)


if __name__ == "__main__":
    command()
