"""What of this project grows with a job's hosts: the ranks' meeting, the folder of their stacks, the hostfile.

    python -m benchmarks.ranks_scale [--ranks 100 1000] [--output results/cpu/ranks_scale/ranks_scale.md]

A rank here is a process forked from one that has loaded torch already, and meets the others as ranks do. Files lie in a folder
of this machine: a file system that hosts share takes longer.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from benchmarks.common import make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import exit_code_of
from clap_ds.ranks.hostfile import expand, format_hostfile, free_port, read_hostfile
from clap_ds.ranks.rendezvous import meet
from clap_ds.ranks.verdict import STACKS as FOLDER
from clap_ds.ranks.verdict import STILL, judge

T = TypeVar("T")
FRAMES = "".join(f'  File "/site/torch/distributed/file{number}.py", line {number} in wait\n' for number in range(20))
STACKS = f"Timeout (0:01:00)!\nThread 0x01 (most recent call first):\n{FRAMES}"


def timed(action: Callable[[], T]) -> tuple[float, T]:
    begun = time.perf_counter()
    found = action()
    return time.perf_counter() - begun, found


def all_meet(num_ranks: int) -> tuple[float, float]:
    """Seconds from the first rank's start to the last one's knowing that all are there, and of it until all have started."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    run, begun, pids = os.urandom(8).hex(), time.perf_counter(), []
    for rank in range(num_ranks):
        if (pid := os.fork()) == 0:
            # The group's own connections are gloo's or NCCL's, all to all, and none of this project's.
            with patch.object(dist, "init_process_group"):
                try:
                    meet(rank, num_ranks, "gloo", run=run)
                except Exception as error:
                    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
                if rank == 0:
                    time.sleep(2.0)  # its store is to outlive the others' last question
                os._exit(0)
        pids.append(pid)
    started_s = time.perf_counter() - begun
    ends = [os.waitpid(pid, 0)[1] for pid in pids[1:]]
    met_s = time.perf_counter() - begun
    assert not any([*ends, os.waitpid(pids[0], 0)[1]]), f"{num_ranks} ranks didn't meet"
    return met_s, started_s


def write_stacks(run_directory: Path, num_ranks: int) -> None:
    """Of ranks that stand still, but for one that is stopped."""
    (run_directory / FOLDER).mkdir(parents=True)
    for rank in range(num_ranks):
        first = {"rank": rank, "host": f"node{rank}", "pid": 1000 + rank, "doing": STILL, "step": 7}
        text = "" if rank == num_ranks // 2 else STACKS
        (run_directory / FOLDER / f"rank{rank}.txt").write_text(f"{json.dumps(first)}\n{text}")


def measure(num_ranks: int, folder: Path) -> dict[str, Any]:
    met_s, started_s = all_meet(num_ranks)
    written_s, _ = timed(lambda: write_stacks(folder, num_ranks))
    judged_s, verdict = timed(lambda: judge(folder, None, ()))
    assert verdict is not None
    assert verdict.hosts == [f"node{num_ranks // 2}"]
    hosts, path = dict.fromkeys(expand(f"node[1-{num_ranks}]"), 4), folder / "hostfile"
    hostfile_s, _ = timed(lambda: path.write_text(format_hostfile(dict.fromkeys(expand(f"node[1-{num_ranks}]"), 4))))
    read_s, found = timed(lambda: read_hostfile(path))
    assert found == hosts
    return {
        "ranks": num_ranks, "started_s": started_s, "met_s": met_s, "stacks_ms": 1e3 * written_s,
        "judged_ms": 1e3 * judged_s, "hostfile_ms": 1e3 * hostfile_s, "read_ms": 1e3 * read_s,
        "hostfile_kb": path.stat().st_size / 1e3,
    }  # fmt: skip


def main() -> None:
    import torch

    from clap_ds.record.hardware import device_name

    parser = make_parser("ranks_scale", __doc__)
    parser.add_argument("--ranks", type=whole_number(2), nargs="+", default=[100, 1000], metavar="N")
    options = parser.parse_args()
    limit = max(options.ranks) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    rows = []
    for number in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(number, Path(folder) / "run"))
    columns = (
        "ranks, and hosts {ranks:,} | s until all have started {started_s:.1f} | s until all have met {met_s:.1f}"
        " | ms to write their stacks {stacks_ms:.0f} | ms to judge them {judged_ms:.0f} | ms to write a hostfile"
        " {hostfile_ms:.1f} | ms to read and check it {read_ms:.1f} | its KB {hostfile_kb:.0f}"
    )
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, Linux {os.uname().release}"
    where = (
        f"{time.strftime('%F')}; {device_name(torch.device('cpu'))}, {os.cpu_count()} cores for all ranks; {versions}"
    )
    show(options.output, f"{where}\n\n{table(columns, rows)}", {"where": where, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
