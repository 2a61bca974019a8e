"""Identify this process's rank under any launcher; run a command on it, and leave it.

Top-level imports are light: a rank rejects a wrong configuration before importing torch and
DeepSpeed.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from clap_ds.config.arguments import add_config, make_parser
from clap_ds.distributed import watchdog
from clap_ds.distributed.accelerator import choose_accelerator as choose_accelerator  # for commands
from clap_ds.distributed.accelerator import explain_no_gpu
from clap_ds.distributed.error_file import (
    ERROR,
    LOST_PEER,
    USER,
    UnreachableError,
    exit_unreachable,
    find_fault,
    is_connection_lost,
    set_error_dir,
    write_error_file,
    write_stopped,
)
from clap_ds.distributed.hostfile import (
    derive_port,
    expand,
    list_rank_hosts,
    parse_tasks,
    this_host,
)
from clap_ds.utils.errors import (
    INTERRUPTED,
    USER_ERROR,
    CollectiveUserError,
    UserError,
    count_of,
    how_to_install,
    printable,
)

if TYPE_CHECKING:
    from clap_ds.config.schema import DebugSettings

FAILED = 1
RANK_0_SPEAKS_S = 8.0  # for rank 0 to report a mistake that other ranks found, too
LAUNCHERS = (
    "start ranks with deepspeed, torchrun or srun (docs/clusters.md), or one rank with plain python"
)
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE")
RANK_VARIABLES = (
    "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID",
    "LOCAL_RANK",
)  # fmt: skip
RUN_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
CORE_LIMITS = resource.getrlimit(resource.RLIMIT_CORE)  # with which this process was started
# SLURM's lowest number of batch shells and interactive steps, whose SLURM_NTASKS is the job's.
SPECIAL_STEPS = 2**32 - 16
# Of glibc's mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the job's size.

    Attributes:
        hosts: of each rank, if srun started them.
        job_folder: of a job's attempt, `F/attempts/K`, for the ranks' error files.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: tuple[str, ...] = ()
    job_folder: Path | None = None

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read the launcher's variables; without any there is one rank. Raises UserError if one is
        missing."""
        try:
            hosts = _adopt_slurm_step()
        except KeyError as error:
            problem = f"{error.args[0]} isn't set, but SLURM_STEP_NUM_TASKS is"
            raise UserError(f"{problem}: {LAUNCHERS}") from None
        job_folder = None
        # Read here, as commands may fail before they parse their options.
        if "--job_folder" in sys.argv[:-1]:
            job_folder = Path(sys.argv[sys.argv.index("--job_folder") + 1]).resolve()
        if not os.environ.get("RANK"):
            sizes = ["WORLD_SIZE", *MPI_SIZES]
            step = os.environ.get("SLURM_STEP_ID", "")
            if step.isdecimal() and int(step) < SPECIAL_STEPS:
                sizes.append("SLURM_NTASKS")
            _reject_other_launchers(*sizes)
            return cls(0, 1, 0, 1, job_folder=job_folder)
        world_size = _read_number("WORLD_SIZE")
        rank = _read_number("RANK", world_size - 1)
        local_world_size = 1
        max_local_rank = None
        for variable in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # of torchrun and DeepSpeed
            if os.environ.get(variable):
                local_world_size = _read_number(variable)
                max_local_rank = local_world_size - 1
                break
        local_rank = _read_number("LOCAL_RANK", max_local_rank)
        if world_size > 1:
            _read_number("MASTER_PORT", 65535)
            if not os.environ.get("MASTER_ADDR"):
                problem = "MASTER_ADDR isn't set, but RANK is: expected rank 0's host"
                raise UserError(f"{problem}; {LAUNCHERS}")
        return cls(rank, world_size, local_rank, local_world_size, hosts, job_folder)

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def host(self) -> str:
        """This rank's host, as SLURM names it."""
        return self.hosts[self.rank] if self.hosts else this_host()

    @property
    def run(self) -> str:
        """An identifier equal on all ranks and unique to the run."""
        ids = [os.environ.get(name, "") for name in RUN_VARIABLES]
        return " ".join([str(self.job_folder), *ids])


def _read_number(name: str, largest: int | None = None) -> int:
    """Return a launcher's variable. Raises UserError if it is missing, no whole number or too
    large."""
    text = os.environ.get(name, "")
    if text.isdecimal() and (largest is None or int(text) <= largest):
        return int(text)
    limit = "" if largest is None else f", at most {largest}"
    problem = f"found {text!r}" if text else "but it isn't set"
    raise UserError(f"{name}: expected a whole number{limit}, {problem}; {LAUNCHERS}")


def _reject_other_launchers(*size_variables: str, num_ranks: int = 1) -> None:
    """Raise CollectiveUserError if another launcher's variables contradict this number of ranks:
    each rank would run alone."""
    expected: dict[str, tuple[str, ...]] = dict.fromkeys(size_variables, ("1", str(num_ranks)))
    if num_ranks == 1:
        expected |= dict.fromkeys(RANK_VARIABLES, ("0",))
    for name, values in expected.items():
        value = os.environ.get(name)
        if value and value not in values:
            raise CollectiveUserError(
                f"{name}={value}, but the launcher didn't set RANK: {LAUNCHERS}"
            )


def _adopt_slurm_step() -> tuple[str, ...]:
    """Set launcher variables from this process's srun step if RANK isn't set, and return every
    rank's host."""
    variables = os.environ
    if variables.get("RANK") or not variables.get("SLURM_STEP_NUM_TASKS"):
        return ()
    # A step of mpirun's daemons, or a shell in a step, passes its variables to all of mpirun's
    # ranks.
    num_tasks = _read_number("SLURM_STEP_NUM_TASKS")
    _reject_other_launchers(*MPI_SIZES, num_ranks=num_tasks)
    counts = parse_tasks(variables["SLURM_STEP_TASKS_PER_NODE"])
    hosts = expand(variables["SLURM_STEP_NODELIST"])
    variables["RANK"] = variables["SLURM_PROCID"]
    variables["WORLD_SIZE"] = str(num_tasks)
    variables["LOCAL_RANK"] = variables["SLURM_LOCALID"]
    variables["LOCAL_WORLD_SIZE"] = str(counts[int(variables["SLURM_NODEID"])])
    # Single ranks need no rendezvous, and an interactive step may hold several.
    if num_tasks > 1:
        step = f"{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"
        variables.setdefault("MASTER_ADDR", hosts[0])
        variables.setdefault("MASTER_PORT", str(derive_port(step)))
    return tuple(list_rank_hosts(dict(zip(hosts, counts, strict=True))))


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that jobs and the deepspeed launcher pass."""
    parser.add_argument("--job_folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)


def make_run_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that launchers start on every rank."""
    parser = make_parser(doc)
    add_config(parser)
    add_rank_options(parser)
    return parser


def announce_accelerator(ranks: Ranks) -> None:
    """Choose GPUs or CPUs before DeepSpeed is imported. Rank 0 prints if CPUs run because there is
    no GPU."""
    is_cpu_requested = os.environ.get("DS_ACCELERATOR") == "cpu"
    if choose_accelerator() == "cpu" and ranks.is_main_process and not is_cpu_requested:
        print(f"no GPU: {count_of(ranks.world_size, 'CPU rank')} ({explain_no_gpu()})", flush=True)


def prepare_debugging(settings: DebugSettings) -> None:
    """Apply `clap.debug`: verbose libraries, core dumps if the shell allows them, and Python stacks
    printed on crashes. Call before CUDA lists GPUs. Keeps variables that are set."""
    if settings.enabled:
        resource.setrlimit(resource.RLIMIT_CORE, CORE_LIMITS)
        faulthandler.enable(all_threads=True)
        os.environ.setdefault("NCCL_DEBUG", "INFO")
        os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,GRAPH,ENV")
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks: clearing new pages takes a seventh of a CPU training
    step."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_MMAP_MAX, 0)


def _on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Record a signal and exit. Imports and raises nothing, as the signal may have interrupted an
    import, even of torch."""
    signal.signal(number, signal.SIG_IGN)
    with suppress(Exception):
        write_stopped(number)
    exit_now(128 + number)


def _report(problem: str) -> None:
    print("error:", printable(problem, "\n"), file=sys.stderr, flush=True)


def run_command(main: Callable[[Ranks], None]) -> NoReturn:
    """Run a command's main function and record what ends it.
    User errors exit with code 2 and one message, printed by rank 0 if it can."""
    # Core files of hundreds of ranks would fill a home directory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, CORE_LIMITS[1]))
    try:
        ranks = Ranks.from_environment()
        if ranks.job_folder is not None:
            set_error_dir(ranks.job_folder, ranks.rank, ranks.host)
            # Until a run exists and records its end.
            for number in watchdog.SIGNALS:
                signal.signal(number, _on_signal)
        main(ranks)
    except UnreachableError as error:
        exit_unreachable(error)
    except UserError as error:
        write_error_file(USER, str(error), USER_ERROR, fault=find_fault(error))
        _report_user_error(error)
        leave(USER_ERROR)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except Exception as error:
        kind = LOST_PEER if is_connection_lost(error) else ERROR
        write_error_file(kind, f"{type(error).__name__}: {error}", FAILED, fault=find_fault(error))
        hint = how_to_install(error)
        if hint:
            _report(f"{error}{hint}")
        else:
            traceback.print_exc()
        leave(FAILED)
    leave(0)


def _report_user_error(error: UserError) -> None:
    """Print an error, on another rank than 0 only if rank 0 may not have it."""
    rank = next(filter(None, map(os.environ.get, RANK_VARIABLES)), "0")
    if rank == "0":
        _report(str(error))
        return
    # Launchers end a job when its first process exits: let rank 0 report first.
    time.sleep(RANK_0_SPEAKS_S)
    if not isinstance(error, CollectiveUserError):
        _report(f"{socket.gethostname()}: rank {rank}: {error}")


def leave(code: int) -> NoReturn:
    """Flush output and exit at once, even if torch's or a loader's threads still run."""
    watchdog.stop()
    # After an error, torch may be half imported.
    dist = sys.modules.get("torch.distributed") if code == 0 else None
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Flush output and exit, also within a signal handler, which may have interrupted a write."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
