"""Start ranks on this machine with DeepSpeed's launcher, quietly and on a free port.

    python -m clap_ds.distributed.local_launch [--num_gpus N] SCRIPT …

DeepSpeed's runner parses only numbers in `CUDA_VISIBLE_DEVICES`. For UUIDs, this starts its single-host launcher
directly, which accepts any name.
"""

import base64
import json
import os
import sys

from clap_ds.distributed.hostfile import free_port

if __name__ == "__main__":
    launcher, visible = ["deepspeed.launcher.runner"], os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith(("GPU-", "MIG-")) and "--num_gpus" not in sys.argv[1:2]:
        hosts = json.dumps({"localhost": visible.split(",")})
        launcher = ["deepspeed.launcher.launch", "--world_info", base64.urlsafe_b64encode(hosts.encode()).decode()]
    words = [*launcher, "--quiet", "--master_port", str(free_port()), *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", *words])
