"""Check one job, write its batch script, and submit it.

Examples:
    clap-ds submit --cluster mine --nodes 2 --config htsat_tiny
    clap-ds submit --cluster mine --nodes 8 --config my_run.json --train --spare_nodes 1
    clap-ds submit --cluster mine --nodes 8 --config my_run.json --train --min_nodes 4
    clap-ds submit --cluster mine --config my_run.json --train -- --restart
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import (
    add_config,
    find_config,
    find_field,
    locate,
    make_parser,
    parse_assignment,
    read_config,
    whole_number,
    with_assignments,
)
from clap_ds.config.batch_sizes import GLOBAL_BATCH, MICRO_BATCH, BatchSizes
from clap_ds.launch.jobs import Job, Jobs, clean_name, utc_timestamp
from clap_ds.launch.sbatch import Request, add_request, build_request
from clap_ds.utils.errors import UserError, count_of, exit_code_of


def start(arguments: argparse.Namespace) -> None:
    """Write and check the job, then submit it."""
    if arguments.min_nodes is not None:
        if not arguments.train:
            raise UserError("--min_nodes needs --train")
        if arguments.min_nodes >= arguments.nodes:
            raise UserError(f"--min_nodes: expected fewer than --nodes {arguments.nodes}")
    request = build_request(arguments, arguments.nodes)
    config = find_config(arguments.config).resolve()
    content = with_assignments(read_config(config), arguments.set)
    changes = dict(map(parse_assignment, arguments.set))
    if arguments.min_nodes is not None:
        sizes = find_batch_sizes(content, arguments.nodes * request.gpus, config)
        fewer_nodes = find_fewer_nodes(content, sizes, arguments.nodes, arguments.min_nodes)
        request = replace(request, fewer_nodes=fewer_nodes)
        changes |= {MICRO_BATCH: sizes.micro_batch, GLOBAL_BATCH: sizes.global_batch}
    run_name = arguments.job_name or find_field(content, "clap.output.run_name") or config.stem
    output_dir = find_field(content, "clap.output.dir") or request.profile.run_root
    name = clean_name(str(run_name))
    changes["clap.output.dir"] = output_dir
    job = Job(name, arguments.nodes, str(config), changes)
    jobs = Jobs(request.profile.root() / "jobs" / f"{name}-{utc_timestamp()}", [job])
    try:
        # `--parsable` prints nothing else to standard output.
        with contextlib.redirect_stdout(sys.stderr if arguments.parsable else sys.stdout):
            jobs.prepare(request)
    except UserError as error:
        # Problems of the job's copy, which no longer exists, are those of the configuration or of
        # --set.
        copy_prefix = f"{jobs.folder / 'run.json'}: "
        lines = str(error).splitlines()
        for index, line in enumerate(lines):
            if line.startswith(copy_prefix):
                lines[index] = locate(line.removeprefix(copy_prefix), config, arguments.set)
        raise UserError("\n".join(lines)) from None
    for _ in jobs.submit([job], *request.submission_options):
        pass
    if arguments.parsable:
        print(job.slurm_id)
    else:
        print_submission(jobs, job, request)


def find_batch_sizes(content: Mapping[str, Any], num_ranks: int, config: Path) -> BatchSizes:
    """Return a run's batch sizes. UserError if they are invalid."""
    try:
        return BatchSizes.from_config(content, num_ranks)
    except ValueError as error:
        raise UserError(f"{config}: {error}") from None


def find_fewer_nodes(
    content: Mapping[str, Any], sizes: BatchSizes, nodes: int, min_nodes: int
) -> list[int]:
    """Return the numbers of nodes, fewer than `nodes`, on which the run has the same global batches.
    UserError if there is none."""
    global_batches = [sizes.global_batch]
    # The check of the job's files reports a ramp that isn't pairs of numbers.
    with contextlib.suppress(TypeError, ValueError):
        ramp = find_field(content, "clap.train.batch_ramp") or []
        global_batches += [int(batch) for _, batch in ramp]
    samples_per_node = sizes.micro_step // nodes
    fewer_nodes = [
        number
        for number in range(nodes - 1, min_nodes - 1, -1)
        if all(batch % (samples_per_node * number) == 0 for batch in global_batches)
    ]
    if not fewer_nodes:
        batches = " and ".join(f"{batch:,}" for batch in sorted({*global_batches}))
        raise UserError(
            f"--min_nodes {min_nodes}: expected a number from {min_nodes} to {nodes - 1} that divides"
            f" the global batch of {batches} samples into whole micro-batches, {samples_per_node:,}"
            " per node"
        )
    return fewer_nodes


def print_submission(jobs: Jobs, job: Job, request: Request) -> None:
    """Print the job's size, its folder and log, and how to follow it."""
    nodes = count_of(job.nodes + request.spare_nodes, "node")
    if request.spare_nodes:
        nodes += f", {request.spare_nodes} of them spare"
    ranks = count_of(request.gpus, "rank")
    limit = request.time_limit(job.nodes)
    log = jobs.log_path(job)
    print(f"""\
submitted job {job.slurm_id}: {nodes}, {ranks} per node, {limit}
folder: {jobs.folder}
log: {log}

    tail -F {shlex.quote(str(log))}
    squeue -j {job.slurm_id}
    scancel {job.slurm_id}""")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_config(parser)
    add_request(parser)
    add("--nodes", type=whole_number(), default=1, metavar="N", help="set the number of nodes")
    fewer_help = (
        "after spare nodes are used up, let training continue on M nodes or more with the same"
        " global batch (default: requeue the job)"
    )
    add("--min_nodes", type=whole_number(), metavar="M", help=fewer_help)
    name_help = (
        "name the run, and the job's folder after it;"
        " training with the same name resumes (default: the run's)"
    )
    add("--job_name", metavar="NAME", help=name_help)
    add("--parsable", action="store_true", help="print only the job's id to standard output")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: start(arguments))


if __name__ == "__main__":
    sys.exit(main())
