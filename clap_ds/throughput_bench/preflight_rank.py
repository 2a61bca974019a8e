"""One rank of `launch/preflight.py`: describe this host, then measure with all ranks.

    preflight_rank.py --job_folder FOLDER MEGABYTES PACKAGE,PACKAGE…

Writes `rank-N.json` before importing anything that a host may lack, and on rank 0 `measured.json`.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from clap_ds.distributed.accelerator import find_gpu, nvidia_smi
from clap_ds.distributed.hostfile import this_host
from clap_ds.distributed.init import Ranks, initialize, run_command
from clap_ds.utils.files import write_object
from clap_ds.utils.paths import describe_software, version

TIMEOUT_S = 180.0  # of a collective, to find unreachable hosts
OTHERS_WRITE_S = 10.0  # for other ranks to write before this one fails and launchers end them


def main(ranks: Ranks) -> None:
    place, megabytes, packages = [word for word in sys.argv[1:] if not word.startswith("--")]
    folder = Path(place)
    gpus = nvidia_smi("--query-gpu=uuid,name,memory.total,driver_version")
    evidence = "" if gpus or os.environ.get("DS_ACCELERATOR") == "cpu" else find_gpu()
    answer: dict[str, Any] = {
        "host": this_host(),
        "gpus": dict(line.split(", ", 1) for line in gpus),
    }
    answer["faults"] = [f"no GPU is visible despite {evidence}"] * bool(evidence)
    if ranks.local_rank == 0:
        versions = {name: version(name) for name in packages.split(",")}
        answer["software"] = {
            **describe_software(),
            "python": platform.python_version(),
            **versions,
        }
    write_object(folder / f"rank-{ranks.rank}.json", answer)
    try:
        device = initialize(ranks, collective_timeout_s=TIMEOUT_S, allow_mixed_code=True)
        from clap_ds.throughput_bench.bandwidth import measure  # torch may be what is missing

        measured = measure(float(megabytes), ranks, device)
    except Exception:
        time.sleep(OTHERS_WRITE_S)
        raise
    if ranks.is_main_process:
        write_object(folder / "measured.json", measured)


if __name__ == "__main__":
    run_command(main)
