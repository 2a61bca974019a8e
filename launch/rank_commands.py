"""Command lines and variables that start a host's ranks, by DeepSpeed's launcher, by torchrun or one by one. Standard library
only.

Leaves running them to `launch/host_agent.py`, and how hosts are reached to `launch/agents.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any


def visible_gpus(number: int, allocated: list[str]) -> list[str]:
    """GPUs of a host's ranks, as `CUDA_VISIBLE_DEVICES` names them there: those that SLURM gave the job.

    Args:
        allocated: their numbers on this host, where SLURM told the job.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "") if "SLURM_JOB_ID" in os.environ else ""
    ids = given.split(",") if given else allocated
    if not given and _devices() == len(ids):
        ids = []  # this process sees no others, and they are counted from 0
    return [str(index) for index in range(number)] if len(ids) < number else ids[:number]


def _devices(folder: str = "/dev") -> int:
    """How many GPUs SLURM lets this process have: permission bits don't tell, its control group does."""
    number = 0
    for name in os.listdir(folder):
        if name.startswith("nvidia") and name[6:].isdecimal():
            with contextlib.suppress(OSError):
                os.close(os.open(f"{folder}/{name}", os.O_RDWR))
                number += 1
    return number


def rank_commands(message: dict[str, Any], host: str, gpus: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """What to start on a host.

    Args:
        message: the job's `start`: `launcher`, `slots` (ranks by host, in their order), `address` and `port` of rank 0's host,
            `wrapper` and `python`, `command` (a script and its arguments).
        gpus: this host's, one for each of its ranks, as `CUDA_VISIBLE_DEVICES` names them.
    """
    slots: dict[str, int] = message["slots"]
    launcher, address, port = message["launcher"], message["address"], str(message["port"])
    python, script = [*message["wrapper"], message["python"], "-u"], message["command"]
    place = list(slots).index(host)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if launcher == "srun":
        first, world_size = sum(list(slots.values())[:place]), sum(slots.values())
        everyone = {
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": slots[host],
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        return [
            ([*python, *script], {**visible, **_text({**everyone, "RANK": first + number, "LOCAL_RANK": number})})
            for number in range(slots[host])
        ]
    if launcher == "torchrun":
        words = ["-m", "torch.distributed.run", f"--nnodes={len(slots)}", f"--node_rank={place}"]
        words += [f"--nproc_per_node={slots[host]}", f"--master_addr={address}", f"--master_port={port}"]
        return [([*python, *words, *script], visible)]
    import base64  # here, for agents are to start fast

    # What DeepSpeed's launcher makes `CUDA_VISIBLE_DEVICES` of is in here, for this host; of others it takes the number alone.
    world = {name: gpus if name == host else list(range(number)) for name, number in slots.items()}
    words = ["-m", "deepspeed.launcher.launch", "--quiet", f"--node_rank={place}"]
    words += [f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}"]
    words += [f"--master_addr={address}", f"--master_port={port}", "--no_local_rank"]
    return [([*python, *words, *script], {})]


def _text(variables: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}
