"""Submit a sweep of jobs (scales, repeats, hyperparameters), show their states, and resubmit
missing ones.

Examples:
    clap-ds sweep --cluster mine --config htsat_tiny --nodes 1 2 4 8 --repeats 3 --dry_run
    clap-ds sweep --cluster mine --config my_run.json --train --vary optimizer.params.lr=1e-4,3e-4 --array
    clap-ds sweep status runs/sweeps/htsat_tiny-…           show the jobs' states
    clap-ds sweep resume runs/sweeps/htsat_tiny-…           resubmit missing jobs
"""

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import (
    add_config,
    make_parser,
    parse_assignment,
    parse_varied,
    whole_number,
)
from clap_ds.config.batch_sizes import ACCUMULATION, GLOBAL_BATCH
from clap_ds.launch.jobs import Job, Jobs, stamp
from clap_ds.launch.sbatch import add_limits, add_request, options_of, request_of
from clap_ds.utils.errors import UserError, exit_code_of, printable
from clap_ds.utils.paths import find_config

DONE = ("completed", "out_of_memory")  # states that a retry would not change


def plan(arguments: argparse.Namespace, root: Path) -> list[Job]:
    """Return the jobs of a command: configurations × nodes × values × repeats."""
    varied = dict(map(parse_varied, arguments.vary))
    choices = itertools.product(
        *([(name, value) for value in values] for name, values in varied.items())
    )
    configs = [find_config(path).resolve() for path in arguments.config]
    jobs: dict[str, Job] = {}
    for config, nodes, values, repeat in itertools.product(
        configs, arguments.nodes, choices, range(arguments.repeats)
    ):
        parts = [f"n{nodes:03d}", *(f"{name.rpartition('.')[2]}_{value}" for name, value in values)]
        parts += [config.stem] if len(configs) > 1 else []
        parts += [f"r{repeat + 1}"] if arguments.repeats > 1 else []
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(parts))
        if name in jobs:
            raise UserError(
                f"two jobs would be named {name}: remove the duplicate value, node count or file name"
            )
        changes = {
            **dict(map(parse_assignment, arguments.set)),
            "clap.output.dir": str(root),
            **dict(values),
        }
        changes |= (
            {GLOBAL_BATCH: arguments.global_batch, ACCUMULATION: None}
            if arguments.global_batch
            else {}
        )
        jobs[name] = Job(name, nodes, str(config), changes, folder=name)
    return list(jobs.values())


def start(arguments: argparse.Namespace) -> None:
    """Plan a sweep, write and check its jobs, then submit them."""
    request = request_of(arguments, max(arguments.nodes))
    name = f"{arguments.config[0].stem}-{stamp()}"
    folder = (arguments.folder or request.profile.root() / "sweeps" / name).resolve()
    if folder.exists():
        raise UserError(
            f"{folder} exists: choose another folder, or use `clap-ds sweep resume {folder}`"
        )
    if arguments.array and len(arguments.nodes) > 1:
        raise UserError(
            "--array: the jobs of an array have one number of nodes; submit a sweep for each"
        )
    sweep = Jobs(folder, plan(arguments, folder / "runs"), array=arguments.array)
    try:
        sweep.prepare(request)
    except UserError as error:  # of a job's folder, which no longer exists
        raise UserError(str(error).replace(f"{folder}/", "").replace("/run.json: ", ": ")) from None
    print(f"sweep: {folder}")
    if not arguments.dry_run:
        return submit(sweep, sweep.jobs, *request.once)
    for path in dict.fromkeys(map(sweep.script, sweep.jobs)):
        print(f"\n# {path}\n{path.read_text()}", end="")


def submit(sweep: Jobs, jobs: list[Job], *options: str) -> None:
    for job in sweep.submit(jobs, *options):
        print(
            f"submitted {job.name}: job {job.slurm_id}, {job.nodes} node{'s' * (job.nodes != 1)}",
            flush=True,
        )


def show_status(sweep: Jobs) -> None:
    standings = sweep.standings()
    width = max(len(job.name) for job in sweep.jobs)
    print(f"{'job':{width}}  nodes  id        state          note")
    for job in sweep.jobs:
        state, note, _ = standings[job.name]
        shown = f"{job.name:{width}}  {job.nodes:<5}  {job.slurm_id or '-':<8}  {state:<13}  {note[:120]}"
        print(printable(shown.rstrip()))
    counts = Counter(each.state for each in standings.values())
    print(", ".join(f"{number} {state}" for state, number in counts.items()))


def resume(sweep: Jobs, arguments: argparse.Namespace) -> None:
    """Resubmit jobs that are neither done nor queued nor running."""
    standings = sweep.standings()
    missing = [
        job
        for job in sweep.jobs
        if not (standings[job.name].is_under_way or standings[job.name].state in DONE)
    ]
    options = [f"--{name}={value}" for name, value in options_of(arguments).items()]
    sweep.check_scripts(missing, options)
    names = ", ".join(job.name for job in missing)
    print(f"resubmitting {len(missing)} of {len(sweep.jobs)} jobs{': ' if missing else ''}{names}")
    for name, status in standings.items():
        if status.state == "held":
            print(f"{name} is held; {status.note}")
    submit(sweep, missing, *options)


def main(argv: Sequence[str] | None = None) -> int:
    what, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if what in ("status", "resume"):
        parser = make_parser(__doc__, what)
        parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the sweep")
        if what == "resume":
            add_limits(parser)
        options = parser.parse_args(rest)
        read = lambda: Jobs.read(options.folder.resolve())  # noqa: E731
        return exit_code_of(
            lambda: resume(read(), options) if what == "resume" else show_status(read())
        )
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_config(parser, action="append")
    add_request(parser)
    nodes_help = "submit a job for each number of nodes"
    add("--nodes", type=whole_number(), nargs="+", default=[1], metavar="N", help=nodes_help)
    batch_help = "keep N samples per step at every scale, by gradient accumulation"
    add("--global_batch", type=whole_number(), metavar="N", help=batch_help)
    add(
        "--repeats",
        type=whole_number(),
        default=1,
        metavar="N",
        help="submit N jobs per configuration",
    )
    add(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=A,B,…",
        help="try these values of a field; repeatable",
    )
    add("--array", action="store_true", help="submit one array job whose tasks are the jobs")
    folder_help = (
        "write the sweep to this new folder (default: one in the cluster profile's run_root)"
    )
    add("--folder", type=Path, metavar="FOLDER", help=folder_help)
    add(
        "--dry_run",
        action="store_true",
        help="write, check and print the scripts without submitting",
    )
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: start(arguments))


if __name__ == "__main__":
    sys.exit(main())
