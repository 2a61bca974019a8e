"""The command that starts a run's ranks on some hosts: DeepSpeed's launcher, by one srun or by pdsh, or torch's on each host.

Leaves running it, and what becomes of the ranks, to `job.py`. Standard library only.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clap_ds.config.errors import UserError
from clap_ds.config.places import PACKAGE

LAUNCHERS = ("slurm", "pdsh", "torchrun")
SSH = "-oBatchMode=yes -oConnectTimeout=15 -oServerAliveInterval=10 -oServerAliveCountMax=3"
"""By which pdsh's ssh gives up a host that is gone."""


def default_launcher() -> str:
    return "slurm" if shutil.which("srun") else "pdsh"


def check_launcher(name: str, python: str) -> None:
    """A UserError where a launcher can't start this Python here: what it reaches hosts by isn't on PATH, or pdsh would take its
    path apart."""
    program = "pdsh" if name == "pdsh" else "srun"
    if shutil.which(program) is None:
        raise UserError(f"launcher {name}: {program} isn't installed on {os.uname().nodename}")
    for path in (os.getcwd(), python) if name == "pdsh" else ():
        if re.search(r"[^\w./+~-]", path):
            raise UserError(f"launcher pdsh: DeepSpeed hands {path!r} to a shell unquoted: take another folder")


@dataclass(frozen=True)
class Launcher:
    """
    Args:
        python: of DeepSpeed's launcher and of the ranks.
        srun_options: further options of the step that the ranks are.
        cpu_bind: how ranks are bound to cores, in srun's words; under pdsh DeepSpeed binds them evenly.
        cpus_per_task: cores of each rank.
        wrapper: words before torchrun's Python, such as a container's program.
        passed: variables that pdsh's ranks get; srun's have them all.
        attempt: name of this start of the run, by which SLURM knows its step; there is no other like it.
    """

    name: str
    python: str = sys.executable
    srun_options: Sequence[str] = ()
    cpu_bind: str | None = None
    cpus_per_task: int | None = None
    wrapper: Sequence[str] = ()
    passed: Sequence[str] = ()
    attempt: str = "clap"

    def command(self, slots: Mapping[str, int], hostfile: Path, port: int, words: Sequence[str]) -> list[str]:
        """Command line that runs `words`, a script and its arguments, in every slot of these hosts.

        Raises:
            UserError: this launcher can't.
        """
        counts, first = {*slots.values()}, next(iter(slots))
        if self.name != "pdsh" and len(counts) > 1:
            raise UserError(f"launcher {self.name} starts as many ranks on every host, found {dict(slots)}: take pdsh")
        ranks = max(counts)
        if self.name == "torchrun":
            rdzv = ["--rdzv_backend=c10d", f"--rdzv_endpoint={first}:{port}", f"--rdzv_id={port}"]
            stops = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
            torchrun = ["-m", "torch.distributed.run", f"--nnodes={len(slots)}", f"--nproc_per_node={ranks}"]
            step = ["srun", f"--ntasks={len(slots)}", *self._step(slots, 1, cores=ranks), "--export=ALL"]
            return [*step, *self.wrapper, self.python, "-u", *torchrun, *rdzv, stops, *words]
        options = ["--hostfile", str(hostfile), "--launcher", self.name, "--force_multi", "--no_ssh_check", "--quiet"]
        options += ["--master_addr", first, "--master_port", str(port)]
        if self.name == "slurm":
            options += [f"--launcher_args={shlex.join(self._step(slots, ranks, cores=1))}"]
        elif self.cpu_bind:
            options += ["--bind_cores_to_rank"]
        return [self.python, "-m", "deepspeed.launcher.runner", *options, *words]

    def _step(self, slots: Mapping[str, int], tasks: int, cores: int) -> list[str]:
        """Options of a step with so many tasks on each of these hosts, of so many ranks' cores each."""
        options = ["--kill-on-bad-exit=1", "--overlap", f"--nodes={len(slots)}", f"--nodelist={','.join(slots)}"]
        options += [f"--ntasks-per-node={tasks}", f"--job-name={self.attempt}"]
        options += [f"--cpus-per-task={self.cpus_per_task * cores}"] if self.cpus_per_task else []
        options += [f"--cpu-bind={self.cpu_bind}"] if self.cpu_bind else []
        return [*options, *self.srun_options]

    def environment(self, folder: Path) -> dict[str, str]:
        """This process's, with what the launcher reads; `folder` holds a file of variables where it wants one."""
        given = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        python_path = os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *given]))
        environment = {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}
        if self.name != "pdsh":
            return environment
        lines = [f"{name}={shlex.quote(os.environ[name])}" for name in self.passed if name in os.environ]
        (folder / "deepspeed_env").write_text("".join(f"{line}\n" for line in lines))
        return environment | {
            "DS_ENV_FILE": str(folder / "deepspeed_env"),
            "PDSH_SSH_ARGS_APPEND": f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH}".strip(),
        }
