"""Commands that start a run's ranks: DeepSpeed's launcher with one srun, or torchrun on each host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.config.paths import PACKAGE

if TYPE_CHECKING:
    from clap_ds.launch.cluster_profile import Site

LAUNCHERS = ("slurm", "torchrun")


@dataclass(frozen=True)
class Launcher:
    site: Site
    python: str  # interpreter of DeepSpeed's launcher and of the ranks
    attempt: str = "clap"  # name of the SLURM step

    @property
    def name(self) -> str:
        return self.site.launcher or LAUNCHERS[0]

    def command(self, slots: Mapping[str, int], hostfile: Path, port: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs `words`, a script and its arguments, in every slot."""
        first, ranks = next(iter(slots.items()))
        if self.name == "torchrun":
            rdzv = ["--rdzv_backend=c10d", f"--rdzv_endpoint={first}:{port}", f"--rdzv_id={port}"]
            stops = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
            torchrun = ["-m", "torch.distributed.run", f"--nnodes={len(slots)}", f"--nproc_per_node={ranks}"]
            step = ["srun", f"--ntasks={len(slots)}", *self._step(slots, 1, cores=ranks), "--export=ALL"]
            return [*step, *self.site.wrapper, self.python, "-u", *torchrun, *rdzv, stops, *words]
        options = ["--hostfile", str(hostfile), "--launcher", self.name, "--force_multi", "--no_ssh_check", "--quiet"]
        options += ["--master_addr", first, "--master_port", str(port)]
        options += [f"--launcher_args={shlex.join(self._step(slots, ranks, cores=1))}"]
        return [self.python, "-m", "deepspeed.launcher.runner", *options, *words]

    def _step(self, slots: Mapping[str, int], tasks: int, cores: int) -> list[str]:
        """Return srun's options for `tasks` tasks per host, each with the CPUs of `cores` ranks."""
        options = ["--kill-on-bad-exit=1", "--overlap", f"--nodes={len(slots)}", f"--nodelist={','.join(slots)}"]
        options += [f"--ntasks-per-node={tasks}", f"--job-name={self.attempt}"]
        options += [f"--cpus-per-task={self.site.cpus_per_task * cores}"] if self.site.cpus_per_task else []
        return [*options, *self.site.srun]


def environment() -> dict[str, str]:
    """Return this process's environment with this package on PYTHONPATH."""
    given = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    python_path = os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *given]))
    return {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}
