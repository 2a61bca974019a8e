"""Inside an allocation, before a job: would a run break here, and on which host?

    python launch/preflight.py --site jupiter [--launcher srun] [--megabytes 315] [--no_ranks]

Asks every host for its clock, code, versions, GPUs and driver, who else has those GPUs, compilers, disk and limits, and
compares; then has all ranks all-reduce a buffer of the gradient's size, checks the sum, and measures each host's links. The
exit code is 1 when something would break the run, 0 otherwise (what is merely slow is a warning). The host's side is in
`preflight_host.py`, the ranks' in `clap_ds/measuring/preflight_rank.py`, what is made of both in `preflight_report.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.places import PACKAGE, work_folder
from clap_ds.dist.hostfile import format_hostfile
from clap_ds.launch import slurm_job
from clap_ds.launch.agents import Agents
from clap_ds.launch.connection import Message
from clap_ds.launch.hostfile import add_hosts, chosen_hosts
from clap_ds.launch.launchers import FOLDER, python_path, script_command
from clap_ds.launch.preflight_report import Answer, Report, judge_hosts, judge_ranks
from clap_ds.launch.rank_environment import rank_environment
from clap_ds.launch.sites import LAUNCHERS, Site, launcher_name, load_site

RANK_SCRIPT = PACKAGE / "measuring" / "preflight_rank.py"
CONNECT_S, ANSWER_S, STOP_S = 60.0, 60.0, 20.0


def ask_hosts(slots: dict[str, int], site: Site, launcher: str) -> dict[str, Answer]:
    """Every host's answer, with the seconds its clock is off; `{"error": …}` for one that gives none."""
    arrived: dict[str, tuple[Message, float]] = {}

    def hear(message: Message) -> None:
        if "answer" in message:
            arrived[message["host"]] = (message, time.time())

    name = f"preflight.{slurm_job.job_id() or 0}.{os.getpid()}"
    agents = Agents(name, site.step(launcher), site.lost_after_s, hear)
    try:
        agents.connect(list(slots), site.start_limit_s or CONNECT_S)
        there = [host.name for host in agents.hosts.values() if host.heard is not None]
        question = _question(slots, site, name)
        asked = time.time()
        agents.say(**question)
        waits, until = {*there}, time.monotonic() + ANSWER_S
        while waits and time.monotonic() < until:
            time.sleep(0.05)
            waits -= {*arrived, *agents.lost(there)}
        lost = agents.lost(there)
    finally:
        agents.stop(STOP_S)
    answers = {}
    for host in agents.hosts.values():
        if host.name in arrived:
            answers[host.name] = _read(*arrived[host.name], asked)
        elif host.heard is None:
            reason = host.lost or host.last_words or "no sign of life"
            answers[host.name] = {"error": f"can't be reached: {reason}"}
        else:
            answers[host.name] = {"error": f"was lost: {lost[host.name]}" if host.name in lost else "gave no answer"}
    return answers


def _question(slots: dict[str, int], site: Site, name: str) -> Message:
    """What agents are asked: to run the host's script as they would a rank."""
    environment = rank_environment(os.environ, site.environment, site.not_passed)
    environment |= {"PYTHONPATH": python_path(), "CLAP_JOB": f"{name}.0"}
    script = [str(FOLDER / "preflight_host.py"), str(site.root()), slurm_job.job_id() or ""]
    return {
        "do": "ask", "command": [*site.wrapper, site.interpreter(), *script], "environment": environment,
        "folder": str(work_folder()), "slots": slots, "gpus": slurm_job.gpus_by_host(),
    }  # fmt: skip


def _read(message: Message, answered: float, asked: float) -> Answer:
    found = re.search(r"^clap-preflight (.*)$", message["answer"], re.MULTILINE)
    if not found:
        return {"error": f"couldn't answer: {message['error'] or 'exit code {}'.format(message['code'])}"}
    answer: Answer = json.loads(found[1])
    # By its own clock the host began after it was asked, and ended before the answer came: only what contradicts that is
    # skew. An answer that is heard late makes this less sharp, never wrong.
    began, ended = message["times"]
    answer["skew_s"] = max(0.0, ended - answered) + min(0.0, began - asked)
    return answer


def run_ranks(name: str, site: Site, slots: dict[str, int], launcher: str, megabytes: float, report: Report) -> None:
    """Start the ranks as a run would, on the site of this name, and judge what they measured."""
    site.root().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="preflight-", dir=site.root()))
    try:
        (folder / "hostfile").write_text(format_hostfile(slots))
        words = ["--site", name, "--folder", folder, "--hostfile", folder / "hostfile", "--launcher", launcher]
        words += ["--requeues", 0, "--", RANK_SCRIPT, folder / "ranks.json", megabytes]
        with (folder / "output").open("wb") as output:
            code = _run(script_command(sys.executable, "job.py", *map(str, words)), output.fileno())
        if code or not (folder / "ranks.json").exists():
            job = read_object(folder / "job.json") if (folder / "job.json").exists() else {}
            last_line = (folder / "output").read_text(errors="replace").strip().rpartition("\n")[2]
            report.problem(f"the ranks failed: {job.get('error') or last_line or f'exit code {code}'}")
        else:
            judge_ranks(read_object(folder / "ranks.json"), slots, report)
    finally:
        report.kept = folder if report.problems else None
        if report.kept is None:
            shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], output: int) -> int:
    """Run a job to its end, of its own accord or because this process is told to end."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "launch/preflight.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--site", default="generic", help="name under launch/clusters/, or a file")
    parser.add_argument("--launcher", type=launcher_name, choices=LAUNCHERS, help="in place of the site's")
    add_hosts(parser)
    parser.add_argument("--megabytes", type=float, default=315.0, help="all-reduced; HTSAT-tiny's gradients are 315")
    parser.add_argument("--no_ranks", action="store_true", help="ask the hosts, start no ranks")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is to stay behind on the hosts
    return exit_code_of(lambda: check(arguments))


def check(arguments: argparse.Namespace) -> int:
    """Ask the hosts, start ranks where nothing stands against it, and print the table. The exit code."""
    if not 0 < arguments.megabytes < math.inf:
        raise UserError(f"--megabytes {arguments.megabytes:g}: expected more than 0")
    site = load_site(arguments.site)
    arguments.slots = arguments.slots or site.gpus_per_node
    slots = chosen_hosts(arguments)
    launcher = arguments.launcher or site.chosen_launcher()
    report = Report()
    on_cpu = {**os.environ, **site.environment}.get("DS_ACCELERATOR") == "cpu"
    answers = ask_hosts(slots, site, launcher)
    judge_hosts(answers, slots, report, on_cpu=on_cpu)
    for host, gpus in ({} if on_cpu else slurm_job.gpus_by_host()).items():
        if not answers.get(host, {"gpus": True}).get("gpus", True):
            report.problem(f"SLURM gave the job {len(gpus)} GPUs there, and none can be seen", host)
    if not report.problems and not arguments.no_ranks:
        run_ranks(arguments.site, site, slots, launcher, arguments.megabytes, report)
    print(report.format())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
