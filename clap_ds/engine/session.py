"""What every command that trains does first and last: ranks, run directory, model, data, engine; how a run's end is recorded.

Leaves the steps in between to the command.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import log_summary
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.timer import ThroughputTimer

from clap_ds.config.check import missing_monitors
from clap_ds.config.errors import UserError
from clap_ds.config.settings import RunSettings
from clap_ds.data.sources import BatchSource, build_batches
from clap_ds.data.supply import verdict
from clap_ds.engine import hub_files
from clap_ds.engine.compiled import compile_statistics
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.kernels import build_kernels, choose_kernels
from clap_ds.engine.loss import LOSSES
from clap_ds.engine.scalars import Scalars
from clap_ds.model.clap import ClapModel
from clap_ds.native.convert import report
from clap_ds.ranks import distributed, failure, watch
from clap_ds.ranks.agreement import gather, on_first, together
from clap_ds.ranks.distributed import Ranks
from clap_ds.ranks.failure import leave_word
from clap_ds.record import hardware, monitor
from clap_ds.record.directory import RunDirectory, State, launcher_is_gone, quiet_deepspeed, start_log
from clap_ds.record.schema import Environment

FAILED = 1
GONE = "its launcher has gone away: nobody reads what it prints"
HOST_ALONE = (
    "note: DeepSpeed's samples/s (RunningAvgSamplesPerSec) are those of the host, which queues steps before the GPU has done"
    " them: timers.throughput.synchronized is false"
)
_LOST = re.compile(
    r"gloo.*(by peer|Broken pipe)|Timed out waiting \d+ms|ncclRemoteError|remote process exit|communicator was aborted"
    "|collective operation timeout",
    re.DOTALL,
)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupted(BaseException):
    """A signal stopped the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def state(self) -> State:
        """SLURM announces the end of the allotted time by USR1; other signals come from a person or a launcher."""
        return "timeout" if self.number == signal.SIGUSR1 else "terminated"


@dataclass
class Session:
    """A run that is ready to step."""

    run: RunSettings
    ranks: Ranks
    device: torch.device
    record: RunDirectory
    engine: ClapEngine
    batches: BatchSource
    scalars: Scalars
    supply_told: bool = False
    quickest: tuple[float, ...] = ()  # rates of the two quickest steps before that was told

    @property
    def samples_per_step(self) -> int:
        """Samples of one rank in one optimiser step."""
        return self.run.batch_sizes(self.ranks.world_size).global_batch // self.ranks.world_size

    def tell_supply(self, rates: Iterable[float]) -> None:
        """Say once, on rank 0, whether the loader keeps up with steps that took so many of its clips per second, not counting
        what they waited for them: the quickest of two or more counts, as it has warmed up."""
        if self.supply_told or not self.ranks.is_first:
            return
        self.quickest = tuple(sorted((*self.quickest, *rates))[-2:])
        supply = self.batches.supply()
        if supply is None or len(self.quickest) < 2:
            return
        ranks, cores = self.ranks.local_world_size, len(os.sched_getaffinity(0))
        print(verdict(supply, self.quickest[-1], ranks_per_host=ranks, cores=cores), flush=True)
        self.supply_told = True


class Start:
    """What a run starts from: here, a fresh model and the beginning of the data. `clap_ds.training.start` has another.

    Attributes:
        held_back: DeepSpeed's sections that the engine is built without, as they would have it synchronise in every step.
        folder: where TensorBoard's files lie, beside what the run leaves elsewhere through all its starts; None: in the run
            directory. For after `prepare`.
    """

    held_back: tuple[str, ...] = ("flops_profiler",)
    folder: Path | None = None

    def build_model(self, run: RunSettings, device: torch.device) -> ClapModel:
        """The model before it is wrapped; the same on every rank.

        Raises:
            ValueError: it can't be had as the settings want it.
        """
        return build_model(run, device)

    def prepare(self, engine: ClapEngine, record: RunDirectory) -> dict[str, Any] | None:
        """Called on all ranks once the model is wrapped: where this rank's data resumes (`BatchSource.state()`), None for the
        beginning.

        Raises:
            ValueError: what the run was to resume from can't be used.
        """
        return None

    def close(self) -> None:
        """Called on all ranks that end in an orderly way, whatever has come before."""


@contextmanager
def open_session(run: RunSettings, ranks: Ranks, start: Start | None = None) -> Iterator[Session]:
    """Set a run up on all ranks, hand it over, and record how it ends.

    Raises:
        UserError: on every rank, for a mistake found on any.
        SystemExit: the run failed or was stopped by a signal; shown and recorded already.
    """
    settings = run.clap.debug
    distributed.prepare_debugging(settings)
    device = distributed.initialize(
        ranks,
        compile_cpu_collective=run.clap.compile_cpu_collective,
        collective_timeout_s=settings.collective_timeout_s if settings.enabled else distributed.COLLECTIVE_TIMEOUT_S,
        cuda_graphs=run.clap.cuda_graphs,
    )
    with quiet_deepspeed():
        together(lambda: _check_deepspeed_sections(run))
    record = _make_record(run, ranks, device)
    failure.speak_in(record.path, ranks.rank, ranks.host)
    if not settings.enabled:  # a debugger may hold a rank for hours
        watch.start(record.path, ranks.rank, ranks.host)
    start = start or Start()
    with _recorded_ending(run, ranks, record, device), closing(start):
        together(lambda: hub_files.fetch(run, ranks))
        torch.manual_seed(run.clap.seed)
        model = together(lambda: start.build_model(run, device))
        with quiet_deepspeed():
            engine = together(lambda: ClapEngine(run.without(*start.held_back), model, device))
        if ranks.is_first and times_host_alone(engine.deepspeed.tput_timer, device):
            print(HOST_ALONE, flush=True)
        # Weights are the same on every rank, dropout and augmentation are not.
        torch.manual_seed(run.clap.seed + 1 + ranks.rank)
        data_state = together(lambda: start.prepare(engine, record))
        if device.type == "cuda":
            kernels = choose_kernels(run, engine.model, device)
            if ranks.is_first:
                record.update_summary(kernels=kernels)
        scalars = Scalars(engine.deepspeed, run.deepspeed.get("tensorboard", {}), start.folder or record.path)
        batches = together(lambda: _build_batches(run, ranks, device, data_state))
        with batches, monitor.watching(record.path if ranks.local_rank == 0 else None, ranks.local_world_size):
            try:
                yield Session(run, ranks, device, record, engine, batches, scalars)
            finally:
                watch.ending()
                scalars.write()
            if run.deepspeed.get("comms_logger", {}).get("enabled"):
                log_summary()
            if ranks.is_first:
                record.update_summary(data=batches.statistics())
                if run.clap.compile != "off":
                    record.update_summary(compile=compile_statistics())
    record.close()


def times_host_alone(timer: ThroughputTimer, device: torch.device) -> bool:
    """Whether DeepSpeed's samples/s tell how fast the host queues steps, not how fast the device has them done."""
    return device.type == "cuda" and timer.config.enabled and not timer.config.synchronized


def _check_deepspeed_sections(run: RunSettings) -> None:
    """What DeepSpeed would find wrong later, on one rank alone while the others wait for it."""
    for problem in missing_monitors(run.deepspeed):
        raise ValueError(f"{run.path}: {problem}")
    for name in ("tensorboard", "csv_monitor"):
        section = run.deepspeed.get(name, {})
        if section.get("enabled") and (folder := section.get("output_path")):
            try:
                Path(folder, section.get("job_name", "DeepSpeedJobName")).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"{run.path}: {name}.output_path: {error}") from None
    try:
        DeepSpeedConfig(dict(run.deepspeed))
    except Exception as error:
        # Whatever DeepSpeed raises while reading its configuration is about the configuration.
        raise ValueError(f"{run.path}: DeepSpeed refuses the configuration: {error}") from None


def _make_record(run: RunSettings, ranks: Ranks, device: torch.device) -> RunDirectory:
    kernels = report(run.clap.cpu_kernels) if device.type == "cpu" else None
    here = hardware.environment(device, kernels)
    everywhere = gather((here["host"], here["device_name"]))
    record = RunDirectory(together(lambda: on_first(lambda: _describe(run, ranks, device, here, everywhere))))
    if ranks.is_first:
        if ranks.job_folder is not None:
            (ranks.job_folder / "run_directory").write_text(f"{record.path}\n")
        print(f"run directory: {record.path}", flush=True)
        if device.type == "cpu" and run.precision == "bf16":
            print(f"CPU kernels: {kernels}", flush=True)
    return record


def _describe(
    run: RunSettings, ranks: Ranks, device: torch.device, here: Environment, everywhere: list[tuple[str, str]]
) -> Path:
    """Make the run directory with its first files, of what is run on what; `everywhere` has each rank's host and device."""
    root, sizes = run.clap.output.root, run.batch_sizes(ranks.world_size)
    hosts = list(dict.fromkeys(host for host, _ in everywhere))
    try:
        record = RunDirectory(RunDirectory.create(Path(root), run.label).path.resolve())
        start_log(record.path / "rank0.log")
        record.write_json("config.json", run.resolved())
        record.write_json(
            "environment.json",
            here
            | {"world_size": ranks.world_size, "num_nodes": len(hosts), "hosts": hosts}
            | {"gpus_per_node": [sum(host == h for h, _ in everywhere) for host in hosts]}
            | {"device_names": sorted({name for _, name in everywhere})},
        )
    except OSError as error:
        raise ValueError(f"{run.path}: clap.output.root: {root!r} can't be written: {error.strerror}") from None
    record.update_summary(
        state="running",
        error=None,
        preset=run.clap.model.preset,
        num_nodes=len(hosts),
        world_size=ranks.world_size,
        micro_batch_per_gpu=sizes.micro_batch,
        gradient_accumulation_steps=sizes.accumulation_steps,
        global_batch=sizes.global_batch,
        text_tokens=run.clap.text_tokens,
        text=run.clap.text,
        precision=run.precision,
        device_name=here["device_name"],
        device_type=device.type,
    )
    return record.path


def build_model(run: RunSettings, device: torch.device) -> ClapModel:
    """A fresh model as `clap.model` describes it, to be run on the device, with the towers of `clap.train.freeze` frozen.

    Raises:
        ValueError: its text tower's pretrained weights can't be had, or the device can't do what is asked for.
    """
    options = run.clap.model
    if run.clap.compile != "off" and device.type == "cpu" and " " in torch.__file__:
        cant = "on CPUs PyTorch can't compile in an environment whose path has a space"
        raise ValueError(f"{run.path}: clap.compile: {cant}: {sys.prefix}")
    model = ClapModel(
        run.clap.preset(),
        drop_path=options.drop_path,
        text_dropout=options.text_dropout,
        spec_augment=options.spec_augment,
        text_from_hub=options.text_from_hub,
        learns_bias=LOSSES[run.clap.loss.kind].needs_bias,
        **build_kernels(run, device),
        checkpoint_activations=tuple(options.checkpoint_activations),
    )
    freeze(model, run.clap.train.freeze)
    return model


def freeze(model: ClapModel, towers: Sequence[str]) -> None:
    """Take towers and their projections out of training.

    As in LAION's training code they stay in training mode: dropout, SpecAugment and batch norm by the batch's statistics act
    as they would otherwise, so that the other tower doesn't learn from fewer variations. A frozen audio tower keeps its running
    statistics.
    """
    for tower in towers:
        model.get_submodule(tower).requires_grad_(False)
        model.get_submodule(f"{tower}_projection").requires_grad_(False)
    if "audio" in towers:
        model.audio.batch_norm.momentum = 0.0


def _build_batches(run: RunSettings, ranks: Ranks, device: torch.device, state: dict[str, Any] | None) -> BatchSource:
    return build_batches(
        run.clap.data,
        model=run.clap.preset(),
        text_tokens=run.clap.text_tokens,
        micro_batch=run.micro_batch,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=run.clap.seed,
        device=device,
        pack_captions=run.clap.text == "packed",
        state=state,
        needs_epochs=run.clap.train.epochs is not None,
    )


@contextmanager
def _recorded_ending(run: RunSettings, ranks: Ranks, record: RunDirectory, device: torch.device) -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        _ignore_signals()  # the first one counts; recording its end must not be interrupted
        stop = Interrupted(number)
        # By every rank: to one that is signalled a moment later, the others' end would look like a failure.
        record.finish(stop.state, f"stopped by {stop}")
        raise stop

    previous = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    except UserError as error:
        if ranks.is_first:
            record.finish("failed", str(error))
        raise  # the command leaves the word
    except Interrupted as stop:
        leave_word(failure.STOPPED, f"stopped by {stop}", 128 + stop.number)
        if ranks.is_first:
            record.finish(stop.state, f"stopped by {stop}")
            print(f"rank {ranks.rank}: stopped by {stop}", file=sys.stderr, flush=True)
        distributed.leave(128 + stop.number)
    except NonFiniteError as error:
        _ignore_signals()
        leave_word(failure.ERROR, str(error), FAILED)
        if ranks.is_first:
            record.finish("failed", str(error))
            _say(ranks, str(error))
        dist.barrier()  # every rank is here; a launcher would end rank 0 before it has spoken if another left
        distributed.leave(FAILED)
    except (ValueError, StopIteration) as error:
        _ignore_signals()  # launchers send them as soon as another rank has ended, perhaps for the same reason
        leave_word(failure.ERROR, str(error), FAILED)
        record.finish("failed", f"rank {ranks.rank}: {error}")
        _say(ranks, str(error))
        distributed.leave(FAILED)
    except Exception as error:
        _ignore_signals()
        if is_out_of_memory(error):
            message = f"out of memory at micro-batch {run.micro_batch} on {hardware.device_name(device)}"
            leave_word(failure.OUT_OF_MEMORY, message, FAILED)
            record.finish("out_of_memory", f"rank {ranks.rank}: {message}")
            _say(ranks, f"{message}: {str(error).splitlines()[0]}")
        elif _is_connection_lost(error):
            reason = str(error).splitlines()[0]
            leave_word(failure.LOST_PEER, reason, FAILED)
            record.finish("failed", f"rank {ranks.rank}: {error}")
            _say(ranks, f"another rank is gone: its connection to this one was lost ({reason})")
        else:
            leave_word(failure.ERROR, f"{type(error).__name__}: {error}", FAILED)
            record.finish("failed", f"rank {ranks.rank}: {error}")
            traceback.print_exc()
        distributed.leave(FAILED)
    else:
        watch.stop()
        if ranks.is_first and launcher_is_gone():
            record.finish("terminated", GONE)
            distributed.leave(128 + signal.SIGPIPE)
        if ranks.is_first:
            record.finish("completed")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the GPU's or the host's memory is exhausted: also to CUDA, cuBLAS or NCCL, which don't ask
    torch's allocator for theirs."""
    said = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said)


def _is_connection_lost(error: BaseException) -> bool:
    """Whether an exception says that another process is gone or gives no answer, as gloo, NCCL and torch's store word it."""
    lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    return lost or isinstance(error, dist.DistNetworkError | dist.DistStoreError)


def _say(ranks: Ranks, message: str) -> None:
    print(f"error: rank {ranks.rank}: {message}", file=sys.stderr, flush=True)
