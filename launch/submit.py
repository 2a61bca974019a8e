"""Check one job, write its batch script, and submit it.

Examples:
    clap-ds submit --cluster mine --nodes 2 --config htsat_tiny
    clap-ds submit --cluster mine --nodes 8 --config my_run.json --train --auto_requeue --spare_nodes 1
    clap-ds submit --cluster mine --config my_run.json --train -- --restart
"""

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import (
    add_config,
    find_field,
    locate,
    make_parser,
    parse_assignment,
    read_config,
    whole_number,
    with_assignments,
)
from clap_ds.launch.jobs import Job, Jobs, stamp
from clap_ds.launch.sbatch import add_request, request_of
from clap_ds.utils.errors import UserError, exit_code_of
from clap_ds.utils.paths import find_config


def start(arguments: argparse.Namespace) -> None:
    """Write and check the job, then submit it."""
    request = request_of(arguments, arguments.nodes)
    profile = request.profile
    config = find_config(arguments.config).resolve()
    content = with_assignments(read_config(config), arguments.set)
    run_name = arguments.job_name or find_field(content, "clap.output.run_name") or config.stem
    output_dir = find_field(content, "clap.output.dir") or profile.run_root
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", str(run_name))
    changes = {**dict(map(parse_assignment, arguments.set)), "clap.output.dir": output_dir}
    job = Job(name, arguments.nodes, str(config), changes)
    jobs = Jobs(profile.root() / "jobs" / f"{name}-{stamp()}", [job])
    try:
        with contextlib.redirect_stdout(sys.stderr if arguments.parsable else sys.stdout):
            jobs.prepare(request)
    except UserError as error:
        # Problems of the job's copy, which no longer exists, are those of the configuration or of
        # --set.
        copy = f"{jobs.folder / 'run.json'}: "
        lines = [
            locate(line.removeprefix(copy), config, arguments.set)
            if line.startswith(copy)
            else line
            for line in str(error).splitlines()
        ]
        raise UserError("\n".join(lines)) from None
    (job,) = jobs.submit([job], *request.once)
    if arguments.parsable:
        return print(job.slurm_id)
    log = shlex.quote(str(jobs.log(job)))
    nodes = job.nodes + request.spare_nodes
    spare = f", {request.spare_nodes} of them spare" if request.spare_nodes else ""
    size = f"{nodes} node{'s' * (nodes != 1)}{spare}, {request.gpus} rank{'s' * (request.gpus != 1)} per node"
    print(
        f"submitted job {job.slurm_id}: {size}, {request.time_limit(job.nodes)}\nfolder: {jobs.folder}"
    )
    print(
        f"log: {jobs.log(job)}\n\n    tail -F {log}\n    squeue -j {job.slurm_id}\n    scancel {job.slurm_id}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_config(parser)
    add_request(parser)
    add("--nodes", type=whole_number(), default=1, metavar="N", help="set the number of nodes")
    name_help = "name the run, and the job's folder after it; training with the same name resumes (default: the run's)"
    add("--job_name", metavar="NAME", help=name_help)
    add("--parsable", action="store_true", help="print only the job's id to standard output")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: start(arguments))


if __name__ == "__main__":
    sys.exit(main())
