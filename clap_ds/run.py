"""Build a run's model, engine and data loader from its settings, for `train.py` and `bench.py`.

All functions are collectives: a mistake that any rank finds is raised as a UserError on all.

Open a run: its directory with the first files, its watchdog, and the record of how it ends.

Record and print how a run ends, in its summary, this rank's error file and the terminal.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import log_summary

from clap_ds.config.settings import RunSettings
from clap_ds.cpu_kernels.patch_model import report
from clap_ds.data.dataloader import BatchSource, build_batches
from clap_ds.distributed import error_file, init, watchdog
from clap_ds.distributed.collectives import gather, raise_on_all_ranks, run_on_rank0
from clap_ds.distributed.error_file import fault_of, is_connection_lost, write_error_file
from clap_ds.distributed.init import Ranks, initialize
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.factory import build_model, fetch_from_hub
from clap_ds.engine.loss import build_loss
from clap_ds.metrics.timers import StepTimer
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.planning.least_memory import TooLittleMemoryError, advise_on_memory, require_memory
from clap_ds.run_records import cpu_binding, environment
from clap_ds.run_records.environment import peak_memory_bytes
from clap_ds.run_records.run_dir import RunDirectory, State, create_run_dir
from clap_ds.utils.errors import UserError, printable
from clap_ds.utils.files import write_atomically


@contextmanager
def join_ranks(run: RunSettings, ranks: Ranks) -> Iterator[torch.device]:
    """Join the process group and yield the device. User errors begin with the run's file."""
    try:
        debug = run.clap.debug
        device = initialize(
            ranks,
            collective_timeout_s=debug.collective_timeout_s,
            allow_mixed_code=debug.allow_mixed_code,
        )
        yield device
    except UserError as error:
        raise type(error)(f"{run.path}: {error}") from None


def setup_model(run: RunSettings, ranks: Ranks, device: torch.device) -> ContrastiveModel:
    """Build a run's model on a device, with the same weights on every rank, if a training step can
    fit in memory."""
    clap = run.clap
    require_memory(run, ranks, device)
    with raise_on_all_ranks():
        fetch_from_hub(clap.model, clap.data, ranks)
    with raise_on_all_ranks():
        torch.manual_seed(clap.seed)
        model = build_model(clap.model, clap.loss, device, clap.train.freeze).to(device)
    return model


def setup_engine(
    run: RunSettings, ranks: Ranks, model: ContrastiveModel, timer: StepTimer
) -> ClapEngine:
    """Build a run's engine around a model; from here on, ranks draw different dropout and
    augmentation."""
    clap = run.clap
    with raise_on_all_ranks():
        loss = build_loss(clap.loss, run.precision, timer.peer_wait)
        engine = ClapEngine(model, loss, run.deepspeed, clap, clap.train, timer)
    torch.manual_seed(clap.seed + 1 + ranks.rank)
    return engine


def setup_dataloader(
    run: RunSettings, ranks: Ranks, engine: ClapEngine, state: dict[str, Any] | None = None
) -> BatchSource:
    """Build a rank's data loader for an engine; it continues from `state`."""
    clap = run.clap
    with raise_on_all_ranks():
        loader = build_batches(
            clap.data,
            model=engine.model.config,
            context_length=clap.context_length,
            micro_batch=run.micro_batch,
            rank=ranks.rank,
            world_size=ranks.world_size,
            ranks_per_host=ranks.local_world_size,
            seed=clap.seed,
            device=engine.device,
            pack_captions=clap.text_packing,
            state=state,
            needs_epochs=clap.train.epochs is not None,
        )
    return loader


@contextmanager
def open_run_dir(run: RunSettings, ranks: Ranks, device: torch.device) -> Iterator[RunDirectory]:
    """Open the run directory with its first files. In the body the watchdog runs, and the run's end
    is recorded. A collective."""
    kernels = report(run.clap.cpu_kernels) if device.type == "cpu" else None
    here = environment.environment(device, kernels)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    everywhere = gather(cpu_binding.place_of_rank(here["host"], here["device_name"], gpu))
    with raise_on_all_ranks():
        path = Path(run_on_rank0(partial(create_run_dir, run, here, everywhere)))
    record = RunDirectory(path)
    if ranks.is_main_process:
        if ranks.job_folder is not None:
            write_atomically(ranks.job_folder / "run_directory", f"{record.path}\n")
        nodes = len({place["host"] for place in everywhere})
        print(f"run directory: {path}\nranks: {ranks.world_size}, nodes: {nodes}", flush=True)
        problem = cpu_binding.find_wrong_binding(
            everywhere, getattr(run.clap.data, "num_workers", 0)
        )
        if problem:
            print(f"warning: {problem}", file=sys.stderr, flush=True)
        if device.type == "cpu" and run.precision == "bf16":
            print(f"CPU kernels: {kernels}", flush=True)
    error_file.set_error_dir(record.path, ranks.rank, ranks.host)
    if not run.clap.debug.enabled:  # a debugger may hold a rank for hours
        watchdog.start(record.path)
    what = lambda: f"micro-batch {run.micro_batch} on {environment.device_name(device)}"  # noqa: E731
    with record_outcome(record, ranks, what):
        yield record
        if run.deepspeed.get("comms_logger", {}).get("enabled"):
            log_summary()
    record.close()


_NO_MEMORY = re.compile("can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
SWALLOWED_S = 20.0
"""Time after which a process ends whose signal's exception a library has caught."""


class StopSignal(BaseException):
    """A signal stopped the run. SLURM sends USR1 before the time limit."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.state: State = "timeout" if number == signal.SIGUSR1 else "terminated"


def outcome_of(error: BaseException, what: str) -> tuple[State, str, str, str]:
    """Return how a run ends after an exception: its state, the kind and message in this rank's
    error file, and what to print. `what` is what was too large if memory is exhausted."""
    text = str(error)
    first_line = str(error).partition("\n")[0]
    if isinstance(error, StopSignal):
        return error.state, error_file.STOPPED, f"stopped by {text}", f"stopped by {text}"
    if is_out_of_memory(error):
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        at = f"out of memory at {what}, after a peak of {peak_memory_bytes(device) / 1e9:.1f} GB"
        return (
            "out_of_memory",
            error_file.OUT_OF_MEMORY,
            at,
            f"{at}: {first_line}\n{advise_on_memory(device.type)}",
        )
    if is_connection_lost(error):
        said = f"another rank is gone: its connection to this one was lost ({first_line})"
        return "failed", error_file.LOST_PEER, first_line, said
    if isinstance(error, NonFiniteError | ValueError | StopIteration):  # in settings or data
        return "failed", error_file.ERROR, text, text
    return "failed", error_file.ERROR, f"{type(error).__name__}: {text}", traceback.format_exc()


@contextmanager
def record_outcome(record: RunDirectory, ranks: Ranks, what: Callable[[], str]) -> Iterator[None]:
    """Record how the body ends, and end this process unless it completes or raises UserError.
    `what` returns what was too large if memory is exhausted, such as "micro-batch 616 on NVIDIA
    H100"."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _ignore_signals()  # the first one counts, and recording it must not be interrupted
        stop = StopSignal(number)
        record.finish(
            stop.state, f"stopped by {stop}"
        )  # every rank: later ones see the others' end as a failure
        signal.signal(signal.SIGALRM, lambda *_: exit_if_caught(stop))
        signal.setitimer(signal.ITIMER_REAL, SWALLOWED_S, SWALLOWED_S)
        raise stop

    def exit_if_caught(stop: StopSignal) -> None:
        if (
            sys.exception() is not stop
        ):  # else it is on its way, and a block that it leaves may wait for a checkpoint
            init.exit_now(128 + stop.number)

    previous = {number: signal.signal(number, interrupt) for number in watchdog.SIGNALS}
    try:
        yield
        watchdog.stop()
        if ranks.is_main_process:
            record.finish("completed")
    except UserError as error:
        if ranks.is_main_process:
            record.finish(
                "out_of_memory" if isinstance(error, TooLittleMemoryError) else "failed", str(error)
            )
        raise
    except (StopSignal, Exception) as error:
        _ignore_signals()  # launchers send them as soon as another rank has ended
        state, kind, message, said = outcome_of(error, what())
        code, word = (128 + error.number, "") if isinstance(error, StopSignal) else (1, "error: ")
        write_error_file(kind, message, code, fault=fault_of(error))
        of_all = isinstance(error, StopSignal | NonFiniteError)  # raised on all ranks
        if ranks.is_main_process or not of_all:
            record.finish(state, message if of_all else f"rank {ranks.rank}: {message}")
            speaker = "" if of_all else f"rank {ranks.rank}: "
            print(printable(f"{word}{speaker}{said}", "\n"), file=sys.stderr, flush=True)
        if isinstance(error, NonFiniteError):
            # if another rank left, a launcher would end rank 0 before it has printed
            dist.barrier()
        init.leave(code)
    finally:
        signal.alarm(0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in watchdog.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU's or host's memory is exhausted. CUDA, cuBLAS and NCCL allocate
    without torch and raise others."""
    said = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)
