"""Starts ranks on this machine by DeepSpeed's launcher, without its page of lines and on a port of their own.

    python -m clap_ds.distributed.local_launch [--num_gpus N] SCRIPT …

DeepSpeed's runner reads only numbers in `CUDA_VISIBLE_DEVICES`. Where that has UUIDs, the launcher that the runner would start
for a single host is started with them: it passes any name on.
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
