"""Check the hosts of an allocation before a job, and name hosts on which a run would fail.

Examples:
    salloc --nodes 4 clap-ds preflight --cluster jupiter
    clap-ds preflight --cluster jupiter            in the shell of an allocation

Starts `clap_ds/throughput_bench/preflight_rank.py` on all hosts as a run would be.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.check_runs import PACKAGES
from clap_ds.config.arguments import make_parser
from clap_ds.distributed.hostfile import list_rank_hosts, slots_from_slurm
from clap_ds.distributed.software import Versions, merge_findings, odd_hosts
from clap_ds.launch.attempt import LauncherErrors, determine_outcome
from clap_ds.launch.cluster_profile import ClusterProfile, add_cluster, load_profile
from clap_ds.launch.launchers import environment, launch_command, prepare_attempt
from clap_ds.utils.errors import exit_code_of
from clap_ds.utils.files import read_bytes, read_object
from clap_ds.utils.paths import PACKAGE

REPORT_LIMIT_S = 120.0  # for every rank to write its report, which precedes heavy imports
REPORTS = "rank-*.json"


def start_ranks(slots: dict[str, int], profile: ClusterProfile, folder: Path) -> int:
    """Run the ranks, which write their reports to the folder, and return the launcher's exit
    code."""
    # A job's script exports them.
    os.environ.update(profile.environment)
    prepare_attempt(folder, slots)
    script = str(PACKAGE / "throughput_bench" / "preflight_rank.py")
    words = [script, "--job_folder", str(folder), *PACKAGES]
    command = launch_command(profile, profile.interpreter(), slots, folder / "hostfile", words)
    with (folder / "output").open("wb") as output:
        # A new session: after Ctrl-C the launcher must receive the signal first and end the ranks.
        launcher = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(REPORT_LIMIT_S)
            # Without a host's report, the others would wait for it in the rendezvous.
            all_report = len([*folder.glob(REPORTS)]) == sum(slots.values())
            return launcher.wait() if all_report else 1
        finally:
            launcher.terminate()  # it ends the ranks
            launcher.wait()


def describe_hosts(reports: Sequence[Mapping[str, Any]]) -> dict[str, Versions]:
    """Return GPUs and software versions by host."""
    software: dict[str, dict[str, str | None]] = defaultdict(dict)
    gpus: dict[str, dict[str, str]] = defaultdict(dict)
    for report in reports:
        software[report["host"]].update(report.get("software", {}))
        gpus[report["host"]].update(report["gpus"])
    for host, names in gpus.items():
        models = " and ".join(sorted({*names.values()}))
        software[host]["GPUs"] = f"{len(names)} × {models}" if names else "0"
    return {**software}


def evaluate(slots: Mapping[str, int], code: int, folder: Path) -> tuple[list[str], list[str]]:
    """Return lines of problems, and lines that describe the hosts, from what the launcher and its
    ranks left in the folder."""
    reports = [read_object(path) for path in sorted(folder.glob(REPORTS))]
    versions_by_host = describe_hosts(reports)
    problems = odd_hosts(versions_by_host)
    for report in reports:
        problems += [(report["host"], fault) for fault in report["faults"]]
    lines = []
    for host, versions in versions_by_host.items():
        revision = versions.get("commit") or versions.get("code")
        torch = versions.get("torch")
        lines.append(f"{host}  GPUs {versions['GPUs']}, torch {torch}, code {revision}")
    # If no host reported, SLURM's reason below is that of all.
    if versions_by_host:
        silent = [host for host in slots if host not in versions_by_host]
        problems += [(host, "unreachable, or starts no rank") for host in silent]
    if (folder / "measured.json").exists():
        measured = read_object(folder / "measured.json")
        rate = f"{measured['bus_gb_per_s']:.2f} GB/s"
        lines.append(f"all-reduce: {rate}, {measured['seconds']:.3f} s")
        for rank, host in enumerate(list_rank_hosts(slots)):
            num_wrong = measured["num_wrong"][rank]
            if num_wrong:
                problem = f"rank {rank} has {num_wrong} wrong elements after an all-reduce"
                problems.append((host, problem))
    else:
        launcher_errors = LauncherErrors(slots)
        launcher_errors.read(read_bytes(folder / "output") + b"\n")
        outcome = determine_outcome(code, folder, list_rank_hosts(slots), None, {}, launcher_errors)
        problems.append(("the ranks failed", outcome.error))
    return [f"problem: {finding}" for finding in merge_findings(problems)], lines


def check(cluster: str) -> int:
    """Check all hosts, print the findings and return the exit code."""
    profile = load_profile(cluster)
    remedy = "set gpus_per_node in the cluster profile"
    slots = slots_from_slurm(os.environ, profile.gpus_per_node, remedy)
    profile.root().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="preflight-", dir=profile.root()))
    code = start_ranks(slots, profile, folder)
    problems, lines = evaluate(slots, code, folder)
    print("\n".join([*lines, *problems]))
    if problems:
        print(f"the ranks' output is in {folder}")
        return 1
    print("no problems found")
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_cluster(parser)
    arguments = parser.parse_args(argv)
    # SIGTERM ends this command like Ctrl-C, so that it leaves no processes on the hosts.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_code_of(lambda: check(arguments.cluster))


if __name__ == "__main__":
    sys.exit(main())
