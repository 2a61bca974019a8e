"""A run's life: join the process group, open the run directory, build model, engine and data
loader, and record and print how the run ends.

`throughput_bench/loop.py` and `training/loop.py` call these functions in this order. All are
collectives: a mistake that any rank finds is raised as a UserError on all.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.comm import log_summary

from clap_ds.config.settings import RunSettings
from clap_ds.cpu_kernels.patch_model import report
from clap_ds.data.dataloader import BatchSource, build_batches
from clap_ds.distributed import error_file, init, watchdog
from clap_ds.distributed.collectives import gather, raise_on_all_ranks, run_on_rank0
from clap_ds.distributed.error_file import find_fault, is_connection_lost, write_error_file
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.process_group import initialize
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.factory import build_model, fetch_from_hub
from clap_ds.engine.loss import build_loss
from clap_ds.metrics.timers import StepTimer
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.planning.least_memory import TooLittleMemoryError, advise_on_memory, require_memory
from clap_ds.run_records import cpu_binding, environment
from clap_ds.run_records.environment import peak_memory_bytes
from clap_ds.run_records.run_dir import RunDirectory, State, create_run_dir
from clap_ds.utils.errors import UserError, printable, warn
from clap_ds.utils.files import write_atomically

# CUDA, cuBLAS and NCCL allocate without torch and raise others than OutOfMemoryError.
_NO_MEMORY = re.compile("can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
# Time after which a process ends whose signal's exception a library has caught.
SWALLOWED_S = 20.0


@contextmanager
def join_ranks(run: RunSettings, ranks: Ranks) -> Iterator[torch.device]:
    """Join the process group and yield the device. User errors begin with the run's file."""
    debug = run.clap.debug
    try:
        # A rank may also raise one later, in the body.
        yield initialize(
            ranks,
            collective_timeout_s=debug.collective_timeout_s,
            allow_mixed_code=debug.allow_mixed_code,
        )
    except UserError as error:
        raise type(error)(f"{run.path}: {error}") from None


@contextmanager
def open_run_dir(run: RunSettings, ranks: Ranks, device: torch.device) -> Iterator[RunDirectory]:
    """Open the run directory with its first files. In the body the watchdog runs, and the run's end
    is recorded. A collective."""
    kernels = report(run.clap.cpu_kernels) if device.type == "cpu" else None
    local_environment = environment.describe_environment(device, kernels)
    places = _gather_places(local_environment, device)
    with raise_on_all_ranks():
        path = Path(run_on_rank0(partial(create_run_dir, run, local_environment, places)))
    record = RunDirectory(path)
    if ranks.is_main_process:
        if ranks.job_folder is not None:
            # The supervisor finds the run by it.
            write_atomically(ranks.job_folder / "run_directory", f"{record.path}\n")
        nodes = len({place["host"] for place in places})
        print(f"run directory: {path}\nranks: {ranks.world_size}, nodes: {nodes}", flush=True)
        num_workers = getattr(run.clap.data, "num_workers", 0)
        problem = cpu_binding.find_wrong_binding(places, num_workers)
        if problem:
            warn(problem)
        if device.type == "cpu" and run.precision == "bf16":
            print(f"CPU kernels: {kernels}", flush=True)
    error_file.set_error_dir(record.path, ranks.rank, ranks.host)
    if not run.clap.debug.enabled:
        # A debugger may hold a rank for hours.
        watchdog.start(record.path, torch.cuda if device.type == "cuda" else None)

    with record_outcome(record, ranks, device):
        yield record
        if run.deepspeed.get("comms_logger", {}).get("enabled"):
            log_summary()
    record.close()


def _gather_places(local_environment: Any, device: torch.device) -> list[Any]:
    """Return every rank's host, device and CPU cores, on rank 0."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    host = local_environment["host"]
    return gather(cpu_binding.describe_place(host, local_environment["device_name"], gpu))


def setup_model(run: RunSettings, ranks: Ranks, device: torch.device) -> ContrastiveModel:
    """Build a run's model on a device, with the same weights on every rank. A collective; raises
    UserError if a training step can't fit in memory."""
    clap = run.clap
    require_memory(run, ranks, device)
    with raise_on_all_ranks():
        # One rank per host downloads files, before all ranks read them.
        fetch_from_hub(clap.model, clap.data, ranks)
    with raise_on_all_ranks():
        # Every rank draws the same weights.
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
        loss = build_loss(clap.loss, run.precision, timer.feature_wait)
        engine = ClapEngine(model, loss, run.deepspeed, clap, clap.train, timer)
    torch.manual_seed(clap.seed + 1 + ranks.rank)
    return engine


def setup_dataloader(
    run: RunSettings, ranks: Ranks, engine: ClapEngine, states: Sequence[dict[str, Any]] = ()
) -> BatchSource:
    """Build a rank's data loader for an engine; it continues from all ranks' `states`."""
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
            pack_captions=clap.packs_captions,
            states=states,
            needs_epochs=clap.train.epochs is not None,
        )
    return loader


class StopSignal(BaseException):
    """A signal stopped the run. SLURM sends USR1 before the time limit."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.state: State = "timeout" if number == signal.SIGUSR1 else "terminated"


class Outcome(NamedTuple):
    """How a run ends after an exception.

    Attributes:
        kind, message: what this rank's error file contains.
        text: what is printed.
    """

    state: State
    kind: str
    message: str
    text: str


def classify_error(error: BaseException, record: RunDirectory, device: torch.device) -> Outcome:
    """Return how a run on a device ends after an exception."""
    text = str(error)
    first_line = text.partition("\n")[0]
    if isinstance(error, StopSignal):
        message = f"stopped by {text}"
        return Outcome(error.state, error_file.STOPPED, message, message)
    if is_out_of_memory(error):
        # `find_micro_batch` may have changed the configuration's.
        micro_batch = record.summary().get("micro_batch_per_gpu")
        place = f"micro-batch {micro_batch} on {environment.device_name(device)}"
        peak_gb = peak_memory_bytes(device) / 1e9
        message = f"out of memory at {place}, after a peak of {peak_gb:.1f} GB"
        advice = f"{message}: {first_line}\n{advise_on_memory(device.type)}"
        return Outcome("out_of_memory", error_file.OUT_OF_MEMORY, message, advice)
    if is_connection_lost(error):
        explanation = f"another rank is gone: its connection to this one was lost ({first_line})"
        return Outcome("failed", error_file.LOST_PEER, first_line, explanation)
    if isinstance(error, NonFiniteError | ValueError | StopIteration):
        # The cause is in settings or data, so a traceback wouldn't help.
        return Outcome("failed", error_file.ERROR, text, text)
    message = f"{type(error).__name__}: {text}"
    return Outcome("failed", error_file.ERROR, message, traceback.format_exc())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU's or host's memory is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


@contextmanager
def record_outcome(record: RunDirectory, ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Record how the body ends, and end this process unless it completes or raises UserError."""
    with _raise_on_signals(record):
        try:
            yield
            watchdog.stop()
            if ranks.is_main_process:
                record.finish("completed")
        except UserError as error:
            if ranks.is_main_process:
                is_memory = isinstance(error, TooLittleMemoryError)
                record.finish("out_of_memory" if is_memory else "failed", str(error))
            raise
        except (StopSignal, Exception) as error:
            # Launchers send signals as soon as another rank has ended.
            _ignore_signals()
            outcome = classify_error(error, record, device)
            code = _report_failure(error, outcome, record, ranks)
            if isinstance(error, NonFiniteError):
                # If another rank left, a launcher would end rank 0 before it has printed.
                dist.barrier()
            init.leave(code)


@contextmanager
def _raise_on_signals(record: RunDirectory) -> Iterator[None]:
    """Raise StopSignal in the body on the first of the launchers' signals, after recording it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # The first one counts, and recording it must not be interrupted.
        _ignore_signals()
        stop = StopSignal(number)
        # On every rank, as later ones see the others' end as a failure.
        record.finish(stop.state, f"stopped by {stop}")
        signal.signal(signal.SIGALRM, lambda *_: exit_if_caught(stop))
        signal.setitimer(signal.ITIMER_REAL, SWALLOWED_S, SWALLOWED_S)
        raise stop

    def exit_if_caught(stop: StopSignal) -> None:
        # If it is on its way, a block that it leaves may wait for a checkpoint.
        if sys.exception() is not stop:
            init.exit_now(128 + stop.number)

    previous_handlers = {number: signal.signal(number, interrupt) for number in watchdog.SIGNALS}
    try:
        yield
    finally:
        signal.alarm(0)
        # Tests and notebooks go on.
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in watchdog.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _report_failure(
    error: BaseException, outcome: Outcome, record: RunDirectory, ranks: Ranks
) -> int:
    """Write the error file and the summary, print the outcome, and return the exit code."""
    is_stop = isinstance(error, StopSignal)
    code = 128 + error.number if isinstance(error, StopSignal) else 1
    write_error_file(outcome.kind, outcome.message, code, fault=find_fault(error))
    # These are raised on all ranks, and rank 0 speaks for them.
    on_all_ranks = is_stop or isinstance(error, NonFiniteError)
    if on_all_ranks and not ranks.is_main_process:
        return code
    speaker = "" if on_all_ranks else f"rank {ranks.rank}: "
    prefix = "" if is_stop else "error: "
    record.finish(outcome.state, f"{speaker}{outcome.message}")
    print(printable(f"{prefix}{speaker}{outcome.text}", "\n"), file=sys.stderr, flush=True)
    return code
