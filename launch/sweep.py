"""Submit a sweep of jobs (scales, repeats, hyperparameters), show their states, and resubmit
missing ones.

Examples:
    clap-ds sweep --cluster mine --config htsat_tiny --nodes 1 2 4 8 --repeats 3 --dry_run
    clap-ds sweep --config my_run.json --train --vary optimizer.params.lr=1e-4,3e-4 --array
    clap-ds sweep status runs/sweeps/htsat_tiny-…           show the jobs' states
    clap-ds sweep resume runs/sweeps/htsat_tiny-…           resubmit missing jobs
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import (
    add_config,
    find_config,
    make_parser,
    parse_assignment,
    parse_varied,
    whole_number,
)
from clap_ds.config.batch_sizes import ACCUMULATION, GLOBAL_BATCH
from clap_ds.launch.jobs import Job, Jobs, clean_name, utc_timestamp
from clap_ds.launch.sbatch import add_limits, add_request, build_request, get_limits
from clap_ds.utils.errors import UserError, count_of, exit_code_of, printable

DONE = ("completed", "out_of_memory")  # states that a retry would not change
LONGEST_NOTE = 120


def plan_jobs(arguments: argparse.Namespace, output_dir: Path) -> list[Job]:
    """Return the jobs of a command: configurations × nodes × values × repeats."""
    varied = dict(map(parse_varied, arguments.vary))
    combinations = itertools.product(*varied.values())
    configs = [find_config(path).resolve() for path in arguments.config]
    changes = {**dict(map(parse_assignment, arguments.set)), "clap.output.dir": str(output_dir)}
    # The file's micro-batch stays, and the accumulation follows from the number of ranks.
    if arguments.global_batch:
        changes |= {GLOBAL_BATCH: arguments.global_batch, ACCUMULATION: None}
    jobs: dict[str, Job] = {}
    for config, nodes, values, repeat in itertools.product(
        configs, arguments.nodes, combinations, range(1, arguments.repeats + 1)
    ):
        # The name has what differs between jobs, such as `n002-lr_0.001-r1`.
        parts = [f"n{nodes:03d}"]
        fields = dict(zip(varied, values, strict=True))
        parts += [f"{field.rpartition('.')[2]}_{value}" for field, value in fields.items()]
        if len(configs) > 1:
            parts.append(config.stem)
        if arguments.repeats > 1:
            parts.append(f"r{repeat}")
        name = clean_name("-".join(parts))
        if name in jobs:
            remedy = "remove the duplicate value, node count or file name"
            raise UserError(f"two jobs would be named {name}: {remedy}")
        jobs[name] = Job(name, nodes, str(config), {**changes, **fields}, folder=name)
    return [*jobs.values()]


def start(arguments: argparse.Namespace) -> None:
    """Plan a sweep, write and check its jobs, then submit them."""
    request = build_request(arguments, max(arguments.nodes))
    name = f"{arguments.config[0].stem}-{utc_timestamp()}"
    folder = (arguments.folder or request.profile.root() / "sweeps" / name).resolve()
    if folder.exists():
        remedy = f"choose another folder, or use `clap-ds sweep resume {folder}`"
        raise UserError(f"{folder} exists: {remedy}")
    if arguments.array and len(arguments.nodes) > 1:
        rule = "the jobs of an array have one number of nodes; submit a sweep for each"
        raise UserError(f"--array: {rule}")
    sweep = Jobs(folder, plan_jobs(arguments, folder / "runs"), array=arguments.array)
    try:
        sweep.prepare(request)
    except UserError as error:
        # Name the job instead of its folder, which no longer exists.
        message = str(error).replace(f"{folder}/", "").replace("/run.json: ", ": ")
        raise UserError(message) from None
    print(f"sweep: {folder}")
    if arguments.dry_run:
        for path in dict.fromkeys(map(sweep.script_path, sweep.jobs)):
            print(f"\n# {path}\n{path.read_text()}", end="")
    else:
        submit(sweep, sweep.jobs, *request.submission_options)


def submit(sweep: Jobs, jobs: list[Job], *options: str) -> None:
    """Submit jobs, and print each."""
    for job in sweep.submit(jobs, *options):
        nodes = count_of(job.nodes, "node")
        print(f"submitted {job.name}: job {job.slurm_id}, {nodes}", flush=True)


def show_status(sweep: Jobs) -> None:
    """Print a table of the jobs' states."""
    statuses = sweep.statuses()
    width = max(len(job.name) for job in sweep.jobs)
    print(f"{'job':{width}}  nodes  id        state          note")
    for job in sweep.jobs:
        status = statuses[job.name]
        row = f"{job.name:{width}}  {job.nodes:<5}  {job.slurm_id or '-':<8}  {status.state:<13}"
        print(printable(f"{row}  {status.note[:LONGEST_NOTE]}".rstrip()))
    counts = Counter(status.state for status in statuses.values())
    print(", ".join(f"{count} {state}" for state, count in counts.items()))


def resume(sweep: Jobs, limits: dict[str, str]) -> None:
    """Resubmit jobs that are neither done nor queued nor running."""
    statuses = sweep.statuses()
    missing = []
    for job in sweep.jobs:
        status = statuses[job.name]
        if not status.is_under_way and status.state not in DONE:
            missing.append(job)
    options = [f"--{name}={value}" for name, value in limits.items()]
    sweep.check_scripts(missing, options)
    names = ", ".join(job.name for job in missing)
    print(
        f"resubmitting {len(missing)} of {len(sweep.jobs)} jobs" + (f": {names}" if names else "")
    )
    for name, status in statuses.items():
        if status.state == "held":
            print(f"{name} is held; {status.note}")
    submit(sweep, missing, *options)


def main(argv: Sequence[str] | None = None) -> int:
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words and words[0] in ("status", "resume"):
        return run_subcommand(words[0], words[1:])
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_config(parser, action="append")
    add_request(parser)
    nodes_help = "submit a job for each number of nodes"
    add("--nodes", type=whole_number(), nargs="+", default=[1], metavar="N", help=nodes_help)
    batch_help = "strong scaling: keep N samples per step at every scale, by gradient accumulation"
    add("--global_batch", type=whole_number(), metavar="N", help=batch_help)
    repeats_help = "submit N jobs per configuration"
    add("--repeats", type=whole_number(), default=1, metavar="N", help=repeats_help)
    vary_help = "try these values of a field; repeatable"
    add("--vary", action="append", default=[], metavar="NAME=A,B,…", help=vary_help)
    add("--array", action="store_true", help="submit one array job whose tasks are the jobs")
    folder_help = (
        "write the sweep to this new folder (default: one in the cluster profile's run_root)"
    )
    add("--folder", type=Path, metavar="FOLDER", help=folder_help)
    dry_run_help = "write, check and print the scripts without submitting"
    add("--dry_run", action="store_true", help=dry_run_help)
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: start(arguments))


def run_subcommand(name: str, words: Sequence[str]) -> int:
    """Run `status` or `resume`."""
    parser = make_parser(__doc__, name)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the sweep")
    if name == "resume":
        add_limits(parser)
    arguments = parser.parse_args(words)

    def run() -> None:
        sweep = Jobs.read(arguments.folder.resolve())
        if name == "resume":
            resume(sweep, get_limits(arguments))
        else:
            show_status(sweep)

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
