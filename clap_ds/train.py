"""Train a CLAP model on audio–caption data.

Examples:
    clap-ds train --config my_run.json   one rank
    deepspeed clap_ds/train.py --deepspeed_config my_run.json   all GPUs of this host
    deepspeed --hostfile H clap_ds/train.py --deepspeed_config my_run.json --set optimizer.params.lr=1e-4

Resumes from the run's newest checkpoint, if any. On SIGTERM, SIGUSR1 or SIGHUP it finishes the
current or next step, saves and exits. Several ranks need `deepspeed` or torchrun.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __package__ in (None, ""):
    # Launched by path: sys.path holds the package's folder, not its parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.checkpoint.train_state import ResumeOptions
from clap_ds.config.arguments import add_checkpoint_choices, locate
from clap_ds.config.settings import load_run
from clap_ds.distributed.init import (
    Ranks,
    announce_accelerator,
    make_run_parser,
    prepare_debugging,
    run_command,
)
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.training.plan import problems_for_training
from clap_ds.utils.errors import UserError


def run_rank(ranks: Ranks, argv: Sequence[str] | None) -> None:
    """Validate options and the run's JSON, and train."""
    parser = make_run_parser(__doc__)
    add_checkpoint_choices(parser)
    arguments = parser.parse_args(argv)
    run = load_run(arguments.config, ranks.world_size, arguments.set)
    if problems := problems_for_training(run.clap, run.deepspeed, ranks.world_size):
        located = [locate(problem, run.path, run.assignments) for problem in problems]
        raise UserError("\n".join(located))
    options = ResumeOptions(
        restart=arguments.restart,
        resume_weights_only=arguments.resume_weights_only,
        skip_steps=arguments.skip_steps,
    )
    prepare_debugging(run.clap.debug)
    announce_accelerator(ranks)

    # Importing torch and DeepSpeed takes seconds: mistakes are reported before.
    from clap_ds.training.loop import train_run

    record = train_run(run, ranks, options)
    if record is not None:
        draw_curves(record)


def draw_curves(record: RunDirectory) -> None:
    """Draw a run's curves, and print its warnings."""
    picture = record.path / "run.png"
    try:
        # matplotlib takes a second, too.
        from clap_ds.analysis.plot_run import draw_runs

        # matplotlib would follow a link.
        picture.unlink(missing_ok=True)
        draw_runs([record.path], picture)
        print(f"curves: {picture}", flush=True)
    except (OSError, UserError) as error:
        print(f"warning: curves not drawn: {error}", flush=True)
    # The last lines, so that they are seen.
    for text in record.summary().get("warnings", []):
        print(f"warning: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run this rank of the command and exit."""
    run_command(lambda ranks: run_rank(ranks, argv))


if __name__ == "__main__":
    main()
