"""Start ranks on this machine with DeepSpeed's launcher, quietly and on a free port.

    python -m clap_ds.distributed.local_launch [--num_gpus N] SCRIPT …
"""

import os
import sys

from clap_ds.distributed.hostfile import free_port

if __name__ == "__main__":
    words = ["deepspeed.launcher.runner", "--quiet", "--master_port", str(free_port()), *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", *words])
