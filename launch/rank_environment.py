"""The environment of ranks: the batch step's own, whole, but for what is one host's or another launcher's. Standard library
only.

It goes to the hosts' agents through their standard input, and neither into arguments nor into files: it holds secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

_NOT_PASSED = re.compile(
    "HOST|HOSTNAME|PWD|OLDPWD|SHLVL|_|TERM.*|DISPLAY|SSH_.*|XDG_(RUNTIME_DIR|SESSION_.*|SEAT|VTNR)|DBUS_.*|BASH_FUNC_.*"
    "|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
    "|(LOCAL_|CROSS_|GROUP_|ROLE_)?(RANK|SIZE|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PMI_.*|PMIX_.*|OMPI_.*"
    "|SLURMD_.*|SLURM_(STEP.*|PROCID|NODEID|LOCALID|GTIDS|TASK_PID|TASKS_PER_NODE|LAUNCH_.*|SRUN_.*|TOPOLOGY_.*|GPUS_ON_NODE"
    "|JOB_GPUS|CPU_BIND.*|DISTRIBUTION|UMASK|PRIO_PROCESS|WORKING_CLUSTER)|CLAP_JOB|CLAP_PROGRESS"
)


def rank_environment(own: Mapping[str, str], site: Mapping[str, str], not_passed: Iterable[str] = ()) -> dict[str, str]:
    """Variables of every rank.

    Args:
        own: the batch step's.
        site: the site file's, over them.
        not_passed: the site's names and patterns (`AWS_*`) of variables to keep back.
    """
    patterns = list(not_passed)
    passed = {name: value for name, value in own.items() if not _NOT_PASSED.fullmatch(name)}
    return {name: value for name, value in passed.items() if not any(fnmatchcase(name, p) for p in patterns)} | dict(
        site
    )
