"""Who this process is among the ranks, by whatever launcher, and how it joins and leaves the group.

Top-level imports stay light: a rank refuses a wrong configuration before torch and DeepSpeed are loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from clap_ds.config.errors import USER_ERROR, AgreedError, UserError, printable
from clap_ds.distributed import error_file, watchdog
from clap_ds.distributed.accelerator import choose_accelerator as choose_accelerator  # for commands
from clap_ds.distributed.accelerator import choose_device
from clap_ds.distributed.error_file import leave_word, some
from clap_ds.distributed.hostfile import expand, free_port, parse_tasks, port_of, read_hostfile, this_host
from clap_ds.distributed.rendezvous import UnreachableError, meet

if TYPE_CHECKING:
    import torch

    from clap_ds.config.schema import DebugSettings

COLLECTIVE_TIMEOUT_S = 1800.0  # one rank's slow start (compiling, downloading) must fit in
FAILED = 1
SECRET = "secret"
"""File in an attempt's folder that its owner alone can read: ranks meet under a name that has it in it."""
RANK_0_SPEAKS_S = 8.0  # for rank 0 to say what is wrong, where other ranks have found the same mistake


@dataclass(frozen=True)
class Ranks:
    """Place of this process in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: tuple[str, ...] = ()  # of every rank, where SLURM or a hostfile tells
    job_folder: Path | None = None  # of a job's attempt, `F/attempts/K`: what the ranks leave for it

    @classmethod
    def from_environment(cls) -> Ranks:
        """What the launcher set; without a launcher there is one rank. A UserError where it contradicts itself."""
        hosts = _adopt_slurm_step()
        words = sys.argv  # of commands, too, that fail before they have read them
        folder = Path(words[words.index("--job_folder") + 1]).resolve() if "--job_folder" in words[:-1] else None
        given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if not any(given.values()):
            return cls(0, 1, 0, 1, job_folder=folder)
        if not all(map(str.isdecimal, given.values())) or int(given["RANK"]) >= int(given["WORLD_SIZE"]):
            found = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise UserError(f"of a launcher: expected whole numbers, RANK below WORLD_SIZE; found {found}")
        rank, world_size, local_rank = map(int, given.values())
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        return cls(rank, world_size, local_rank, local_world_size, hosts, folder)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def host(self) -> str:
        """Of this rank, by SLURM's or the hostfile's name."""
        return self.hosts[self.rank] if self.hosts else this_host()

    @property
    def run(self) -> str:
        """The same on all ranks, and in other jobs another one; nobody else knows a job's."""
        secret = ""
        if self.job_folder is not None:
            with contextlib.suppress(OSError):  # of what starts ranks without one, such as preflight
                secret = (self.job_folder / SECRET).read_text()
        ids = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
        return " ".join([f"{secret}{self.job_folder}", *(os.environ.get(name, "") for name in ids)])


def _adopt_slurm_step() -> tuple[str, ...]:
    """Set the variables of a launcher from the step of srun that this process is a task of, where no launcher has set RANK;
    every rank's host."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    if os.environ.get("RANK") or not tasks:
        return ()
    counts, hosts = parse_tasks(os.environ["SLURM_STEP_TASKS_PER_NODE"]), expand(os.environ["SLURM_STEP_NODELIST"])
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=tasks, LOCAL_RANK=os.environ["SLURM_LOCALID"])
    os.environ["LOCAL_WORLD_SIZE"] = str(counts[int(os.environ["SLURM_NODEID"])])
    if int(tasks) > 1:  # one alone has nobody to meet, and there may be several in an interactive step
        os.environ.setdefault("MASTER_ADDR", hosts[0])
        os.environ.setdefault(
            "MASTER_PORT", str(port_of(f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"))
        )
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Options that launchers and jobs give to a command of theirs."""
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="refuse to run on fewer or more ranks")
    parser.add_argument("--job_folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it


def run_arguments(prog: str, description: str) -> argparse.ArgumentParser:
    """Command line of a command that launchers start on every rank."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    config = "the run's JSON, or a packaged one's name"
    parser.add_argument("--deepspeed_config", type=Path, required=True, metavar="FILE", help=config)
    add_rank_options(parser)
    return parser


def check_hostfile(path: Path, ranks: Ranks) -> Ranks:
    """The ranks with their hosts; a UserError where a DeepSpeed hostfile can't be read, or the launcher has started fewer or
    more ranks, or on other hosts."""
    try:
        slots = read_hostfile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--hostfile {error}") from None
    hosts = tuple(host for host, number in slots.items() for _ in range(number))
    if len(hosts) != ranks.world_size:
        raise UserError(f"--hostfile {path} promises {len(hosts)} ranks, the launcher started {ranks.world_size}")
    if ranks.hosts and {*ranks.hosts} != {*hosts}:
        found = some([*dict.fromkeys(ranks.hosts)])
        raise UserError(f"--hostfile {path}: srun started ranks on {found}: give deepspeed --include {'@'.join(slots)}")
    return replace(ranks, hosts=ranks.hosts or hosts)


def initialize(ranks: Ranks, *, collective_timeout_s: float = COLLECTIVE_TIMEOUT_S) -> torch.device:
    """Join the process group and choose this rank's device; a UserError where it has none, or the port to meet at is taken."""
    device = choose_device(ranks.rank, ranks.local_rank)

    import deepspeed
    import torch

    if ranks.world_size == 1 and "MASTER_ADDR" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    if device.type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            # Ranks that each use every core slow each other down, in the optimizer by up to 80 times.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size))
        keep_freed_memory()
        deepspeed.ops.__compatible_ops__ = {}  # looking into it would try the compiler on every operation
    # Otherwise gloo connects every rank with every other, in each of its groups: sockets as the square of the ranks.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "gloo" if device.type == "cpu" else "nccl"
    if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ and not torch.distributed.is_initialized():
        # As DeepSpeed does where it makes the group itself.
        bound = device if backend == "nccl" and ranks.world_size > 1 else None
        meet(ranks.rank, ranks.world_size, backend, ranks.hosts, bound, ranks.run)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=collective_timeout_s))
    return device


def prepare_debugging(settings: DebugSettings) -> None:
    """`clap.debug`: have libraries say more, and crashes leave a Python stack on the terminal. Call before CUDA is asked
    for GPUs. Variables that the user has set stay."""
    if settings.enabled:
        faulthandler.enable(all_threads=True)
        os.environ.setdefault("NCCL_DEBUG", "INFO")
        os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,GRAPH,ENV")
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def keep_freed_memory() -> None:
    """Have glibc keep large blocks: the kernel would clear each anew, page by page, a seventh of a training step on a CPU."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_mmap_max, 0)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    leave_word(error_file.STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)
    leave(128 + number)


def run_command(main: Callable[[Ranks], None]) -> NoReturn:
    """Run a command's main function, and leave a word of what ends it. User errors become one message, of rank 0 where it can
    give it, and exit code 2."""
    try:
        ranks = Ranks.from_environment()
        if ranks.job_folder is not None:
            error_file.speak_in(ranks.job_folder, ranks.rank, ranks.host)
            signal.signal(signal.SIGTERM, _end)  # before there is a run, whose end would have to be recorded
        main(ranks)
    except UnreachableError as error:
        leave_word(error_file.UNREACHABLE, str(error), FAILED, hosts=error.hosts)
        print("error:", printable(str(error)), file=sys.stderr, flush=True)
        leave(FAILED)
    except UserError as error:
        leave_word(error_file.USER, str(error), USER_ERROR)
        told = printable(str(error), "\n")
        if os.environ.get("RANK", "0") in ("", "0"):
            print(f"error: {told}", file=sys.stderr, flush=True)
        else:
            # Launchers end a job when its first process exits: rank 0, where it has found the same mistake, speaks for all.
            time.sleep(RANK_0_SPEAKS_S)
            if not isinstance(error, AgreedError):
                print(f"error: {socket.gethostname()}: rank {os.environ['RANK']}: {told}", file=sys.stderr, flush=True)
        leave(USER_ERROR)
    except Exception as error:
        leave_word(error_file.ERROR, f"{type(error).__name__}: {error}", FAILED)
        traceback.print_exc()
        leave(FAILED)
    leave(0)


def leave(code: int) -> NoReturn:
    """End this process now, with its output written, whatever threads of torch or a loader are still about."""
    watchdog.stop()
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and code == 0:
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
