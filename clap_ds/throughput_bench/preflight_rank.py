"""Describe this host and measure an all-reduce: one rank of `launch/preflight.py`.

    preflight_rank.py --job_folder FOLDER PACKAGE…

Writes `rank-0000N.json` before importing anything that a host may lack, and on rank 0
`measured.json`.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from clap_ds.config.arguments import make_parser
from clap_ds.distributed.accelerator import find_gpu, nvidia_smi
from clap_ds.distributed.hostfile import this_host
from clap_ds.distributed.init import Ranks, add_rank_options, run_command
from clap_ds.utils.files import write_object
from clap_ds.utils.paths import describe_software, version

ALL_REDUCE_BYTES = 308_000_000
TIMEOUT_S = 180.0  # of a collective, to find unreachable hosts
# A launcher ends all ranks once one has failed. Until then the slower ranks write their reports.
REPORT_GRACE_S = 10.0


def describe_host(ranks: Ranks, packages: Sequence[str]) -> dict[str, Any]:
    """Return this rank's report: its host, GPUs by UUID, faults and, from one rank per host, the
    versions of the software (None: not installed)."""
    gpu_lines = nvidia_smi("--query-gpu=uuid,name,memory.total,driver_version")
    report: dict[str, Any] = {
        "host": this_host(),
        "gpus": dict(line.split(", ", 1) for line in gpu_lines),
        "faults": [],
    }
    if not gpu_lines and os.environ.get("DS_ACCELERATOR") != "cpu":
        evidence = find_gpu()
        if evidence:
            report["faults"].append(f"no GPU is visible despite {evidence}")
    if ranks.local_rank == 0:
        report["software"] = {
            **describe_software(),
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        }
    return report


def main(ranks: Ranks) -> None:
    parser = make_parser(__doc__)
    add_rank_options(parser)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="report their versions")
    options = parser.parse_args()
    report = describe_host(ranks, options.packages)
    write_object(options.job_folder / f"rank-{ranks.rank:05}.json", report)
    try:
        # Not at the top: torch may be what this host lacks.
        from clap_ds.throughput_bench.bandwidth import join_and_time_all_reduce

        measured = join_and_time_all_reduce(ranks, ALL_REDUCE_BYTES, TIMEOUT_S)
    except Exception:
        time.sleep(REPORT_GRACE_S)
        raise
    if ranks.is_main_process:
        write_object(options.job_folder / "measured.json", measured)


if __name__ == "__main__":
    run_command(main)
