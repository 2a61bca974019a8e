"""One job from one command: checked, written as a batch script, and queued.

    python launch/submit.py --site mine --nodes 2 --config ds_configs/htsat_tiny.json [--check]
    python launch/submit.py --site mine --nodes 8 --config my_run.json --train --until_done [--spare_nodes 1]

The job's folder, under the site's `run_root`, holds the run's JSON as it was when submitted, the script, `submitted.json`
with the job's id, its log, and what the job records itself. Runs on a login node. Leaves many jobs at once to `sweep.py`.
"""

import argparse
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, by any Python
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"error: launch/submit.py needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import add_checkpoint_choices, check_checkpoint_choices, whole_number
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.files import read_object, write_atomically, write_object
from clap_ds.config.places import find_config
from clap_ds.launch import slurm
from clap_ds.launch.batch_script import (
    Request,
    add_request,
    check,
    check_batch,
    finishing,
    log_file,
    request_of,
    script,
)
from clap_ds.launch.run_config import read_config, with_output
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import

RECORD = "submitted.json"


def start(arguments: argparse.Namespace) -> None:
    """Check everything; then write the job's folder and submit it, or with `--check` show the script."""
    if arguments.until_done and not arguments.train:
        raise UserError("--until_done: only training goes on where it was, a benchmark doesn't: give --train, too")
    config = find_config(arguments.config).resolve()
    more = {name: getattr(arguments, name) for name in ("spare_nodes", "shrink", "until_done")}
    more["train_options"] = tuple(_train_options(arguments))
    request = request_of(arguments, **more)
    site = request.load_site()
    content = with_output(read_config(config), stem=config.stem, label=arguments.label, root=site.run_root)
    check_batch(content, arguments.nodes * request.gpus, str(arguments.config))
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", str(content["clap"]["output"]["label"]))
    jobs = site.root() / "jobs"
    refuse_second(jobs, label)
    folder, name = RunDirectory.create(jobs, label).path, slurm.unique_name(f"clap-{label}")
    try:
        text = script(request, arguments.nodes, name, log_file(folder, "slurm-%j.out"), [folder])
        write_object(folder / "run.json", content)
        found = check(request, {arguments.nodes: text}, {str(arguments.config): folder / "run.json"})
        if arguments.check:
            print(found.format())
        for note in () if arguments.check else found.unchecked:
            print(f"note: {note}")
        found.refuse()
        write_atomically(folder / "job.sbatch", text)
    except BaseException:
        shutil.rmtree(folder)
        raise
    if arguments.check:
        shutil.rmtree(folder)
        print(f"\n# {folder / 'job.sbatch'}\n{text}", end="")
        return
    queue(request, arguments.nodes, folder, name)


def _train_options(arguments: argparse.Namespace) -> list[str]:
    """What follows `--`, if `clap_ds/train.py` takes it; ends the program otherwise."""
    options: list[str] = arguments.train_options
    if options and not arguments.train:
        raise UserError(f"-- {' '.join(options)}: options of training, without --train")
    parser = argparse.ArgumentParser("launch/submit.py … --train --", allow_abbrev=False)
    add_checkpoint_choices(parser)
    check_checkpoint_choices(parser, parser.parse_args(options))
    return options


def queue(request: Request, nodes: int, folder: Path, name: str) -> None:
    """Record the job's name, submit it, record its id, and say how to follow it."""
    record: dict[str, Any] = {"name": name, "job": None, "submitted": slurm.now(), "nodes": nodes + request.spare_nodes}
    write_object(folder / RECORD, record)
    with finishing():
        try:
            record["job"] = slurm.submit(folder / "job.sbatch", name)
        except slurm.RefusedError:
            shutil.rmtree(folder)
            raise
        write_object(folder / RECORD, record)
        spare = f", {request.spare_nodes} of them spare" if request.spare_nodes else ""
        size = f"{record['nodes']} nodes{spare}, {request.gpus} ranks on each, {request.time_limit(request.load_site(), nodes)}"
        print(f"submitted job {record['job']}: {name}, {size}\nfolder: {folder}")
        print(how_to_follow(folder, record["job"]))


def how_to_follow(folder: Path, job: str) -> str:
    log = folder / f"slurm-{job}.out"
    return f"log: {log}\n\n    tail -F {shlex.quote(str(log))}\n    squeue -j {job}\n    scancel {job}"


def refuse_second(jobs: Path, label: str) -> None:
    """A UserError, once, where an earlier call was cut off before it knew the id of a job that SLURM does have."""
    for path in sorted(jobs.glob(f"{label}-*/{RECORD}")):
        record = read_object(path)
        found = record["job"] is None and slurm.find_job(record["name"], record["submitted"])
        if found:
            write_object(path, {**record, "job": found})
            raise UserError(
                f"job {found} was submitted at {record['submitted']} by a call that was cut off; nothing is submitted now\n"
                f"{how_to_follow(path.parent, found)}\n\nThe same command again submits another job."
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "launch/submit.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    add_request(parser)
    add = parser.add_argument
    add("--nodes", type=whole_number(), default=1)
    add("--label", help="first part of the names of the job's folder and the run's; training of one label resumes")
    add(
        "--spare_nodes",
        type=whole_number(0),
        default=0,
        metavar="K",
        help="nodes to allocate beside, for ones that fail",
    )
    add("--shrink", action="store_true", help="go on with fewer nodes when one fails and none is spare")
    add("--until_done", action="store_true", help="queue training again, when its time is over, until it is complete")
    add("--check", action="store_true", help="check everything and show the script, submit nothing")
    add("train_options", nargs="*", metavar="-- OPTION", help="of clap_ds/train.py, such as --restart")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: start(arguments))


if __name__ == "__main__":
    sys.exit(main())
