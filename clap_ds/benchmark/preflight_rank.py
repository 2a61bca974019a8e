"""One rank of `launch/preflight.py`: check this host, then measure with all ranks.

    preflight_rank.py --job_folder FOLDER MEGABYTES PACKAGE,PACKAGE…

Writes `rank-N.json` before importing anything that a host may lack, and on rank 0 `measured.json`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from clap_ds.config.files import write_object
from clap_ds.config.paths import PACKAGE, version
from clap_ds.distributed.accelerator import find_gpu, nvidia_smi
from clap_ds.distributed.hostfile import this_host
from clap_ds.distributed.init import Ranks, initialize, run_command

TIMEOUT_S = 180.0  # of a collective, to find unreachable hosts
OTHERS_WRITE_S = 10.0  # for other ranks to write before this one fails and launchers end them
MIN_FREE_GB = 5.0


def main(ranks: Ranks) -> None:
    place, megabytes, packages = [word for word in sys.argv[1:] if not word.startswith("--")]
    folder, mine = Path(place), gpus()
    answer: dict[str, Any] = {"host": this_host(), "gpus": mine, "faults": [*faults(mine, folder)]}
    if ranks.local_rank == 0:
        versions = {"python": platform.python_version(), **{name: version(name) for name in packages.split(",")}}
        answer["software"] = {"code": code_digest(), **versions}
    write_object(folder / f"rank-{ranks.rank}.json", answer)
    try:
        device = initialize(ranks, collective_timeout_s=TIMEOUT_S)
        from clap_ds.benchmark.bandwidth import measure  # torch may be what is missing

        measured = measure(float(megabytes), ranks, device)
    except Exception:
        time.sleep(OTHERS_WRITE_S)
        raise
    if ranks.is_main_process:
        write_object(folder / "measured.json", measured)


def code_digest() -> str:
    """Hash the package's Python files and presets, including names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json") and path.is_file()):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def gpus() -> dict[str, str]:
    """Return name, memory and driver of this rank's GPUs by UUID."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    lines = [line.split(", ", 2) for line in nvidia_smi("--query-gpu=index,uuid,name,memory.total,driver_version")]
    is_any = words[0][:4] in ("", "MIG-")  # a MIG slice's GPU isn't listed
    return {uuid: shown for index, uuid, shown in lines if is_any or index in words or uuid in words}


def faults(mine: dict[str, str], folder: Path) -> Iterator[str]:
    """Yield problems of this host: low disk space, missing GPUs, and GPUs used by other processes."""
    for place in (str(folder.parent), "/tmp"):
        free_gb = shutil.disk_usage(place).free / 1e9
        if free_gb < MIN_FREE_GB:
            yield f"{free_gb:.0f} GB free in {place}, expected {MIN_FREE_GB:.0f}"
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return
    if not mine and (found := find_gpu()):
        yield f"no GPU is visible despite {found}"
    for line in nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,process_name"):
        uuid, pid, memory, name = line.split(", ", 3)
        command = Path(f"/proc/{pid}/cmdline")
        is_rank = command.exists() and str(folder).encode() in command.read_bytes()
        if uuid in mine and not is_rank:
            yield f"a GPU is in use by process {pid} ({name}), {memory}"


if __name__ == "__main__":
    run_command(main)
