"""Inside an allocation, before a job: would a run break here, and on which host?

    python launch/preflight.py --site jupiter [--launcher pdsh] [--megabytes 315]

Starts one script on all hosts as a run would be (`clap_ds/measuring/preflight_rank.py`): every host says what it has, then all
ranks all-reduce a buffer of the gradient's size, check the sum, and measure links and arithmetic. The exit code is 1 when
something would break the run, 0 otherwise. What is made of the answers is in `preflight_report.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.check_runs import PACKAGES
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.places import PACKAGE
from clap_ds.launch.hostfile import add_hosts, chosen_hosts
from clap_ds.launch.launchers import LAUNCHERS, Launcher
from clap_ds.launch.preflight_report import Report, judge_hosts, judge_ranks
from clap_ds.launch.sites import Site, load_site
from clap_ds.ranks import verdict
from clap_ds.ranks.hostfile import format_hostfile, master_port

ARRIVE_S = 120.0
"""For every rank to say what it finds, before it imports anything: a host without is named then, and not waited for."""
RANK_SCRIPT = PACKAGE / "measuring" / "preflight_rank.py"


def ask(slots: dict[str, int], site: Site, launcher: str, megabytes: float, folder: Path) -> int:
    """Start the ranks and wait for them; the launcher's exit code. What they say is in the folder, with their `output`."""
    os.environ.update(site.environment)
    start = Launcher(
        launcher, site.interpreter(), site.srun, site.cpu_bind, site.cpus_per_task, site.wrapper, [*site.environment]
    )
    (folder / "hostfile").write_text(format_hostfile(slots))
    words = [str(RANK_SCRIPT), "--job_folder", str(folder), str(megabytes), ",".join(PACKAGES)]
    port = master_port(f"{os.environ.get('SLURM_JOB_ID', 0)}.{os.getpid()}")
    command = start.command(slots, folder / "hostfile", port, words)
    with (folder / "output").open("wb") as output:
        # In a session of its own: the launcher ends the ranks when it is told to, and not with them at once.
        process = subprocess.Popen(
            command, env=start.environment(folder), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(ARRIVE_S)
            if len(answered(slots, folder)) == sum(slots.values()):
                return process.wait()
        finally:
            process.terminate()  # it ends the ranks
            process.wait()
    return process.returncode


def answered(slots: dict[str, int], folder: Path) -> dict[int, Path]:
    """Files of the ranks that have answered. By name: a network's file system may list a folder as it was."""
    paths = {rank: folder / f"rank-{rank}.json" for rank in range(sum(slots.values()))}
    return {rank: path for rank, path in paths.items() if path.exists()}


def judge(slots: dict[str, int], code: int, folder: Path) -> Report:
    """What the answers in the folder amount to; hosts without one are named with the launcher's words about them."""
    report, known = Report(), {name.partition(".")[0]: name for name in slots}
    ranks = {rank: read_object(path) for rank, path in answered(slots, folder).items()}
    for answer in ranks.values():
        answer["host"] = known.get(answer["host"].partition(".")[0], answer["host"])
    lines = (folder / "output").read_text(errors="replace").splitlines()
    silent = [host for host in slots if host not in {answer["host"] for answer in ranks.values()}]
    said = {found[1]: found[2] for line in lines if (found := re.match(r"(?:srun: error: )?(\S+): (.*)", line))}
    # SLURM terminates all tasks for the sake of one.
    for host in [host for host in silent if not said.get(host, "").endswith("Terminated")] or silent:
        report.fault(f"can't be reached, or starts no rank: {said.get(host, 'no sign of life')}", host)
    judge_hosts(ranks, slots, report)
    if (folder / "measured.json").exists():
        judge_ranks(read_object(folder / "measured.json"), [answer["host"] for answer in ranks.values()], report)
    elif not report.problems:
        cause = verdict.judge(None, folder, [host for host, count in slots.items() for _ in range(count)])
        report.fault(cause.message if cause else f"exit code {code}", "the ranks failed")
    return report


def check(arguments: argparse.Namespace) -> int:
    """Ask all hosts and print the table. The exit code."""
    if not 0 < arguments.megabytes < math.inf:
        raise UserError(f"--megabytes {arguments.megabytes:g}: expected more than 0")
    site = load_site(arguments.site)
    arguments.slots = arguments.slots or site.gpus_per_node
    slots = chosen_hosts(arguments)
    site.root().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="preflight-", dir=site.root()))
    report = None
    try:
        launcher = arguments.launcher or site.chosen_launcher()
        report = judge(slots, ask(slots, site, launcher, arguments.megabytes, folder), folder)
    finally:
        if report is None or not report.problems:
            shutil.rmtree(folder, ignore_errors=True)
    print(report.format())
    if report.problems:
        print(f"the ranks' output is in {folder}")
    return 1 if report.problems else 0


def main(argv: list[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("launch/preflight.py", description=description, allow_abbrev=False)
    parser.add_argument("--site", default="generic", help="name under launch/clusters/, or a file")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="in place of the site's")
    add_hosts(parser)
    parser.add_argument("--megabytes", type=float, default=315.0, help="all-reduced; HTSAT-tiny's gradients are 315")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is to stay behind on the hosts
    return exit_code_of(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
