"""Set up and tear down what `train.py` and `bench.py` share: process group, run directory, engine and `Session`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.comm import log_summary
from deepspeed.runtime.config import DeepSpeedConfig

from clap_ds.config.check import missing_monitors
from clap_ds.config.errors import printable
from clap_ds.config.files import write_atomically
from clap_ds.config.settings import RunSettings
from clap_ds.cpu_kernels.patch_model import report
from clap_ds.data.dataloader import BatchSource, build_batches
from clap_ds.data.loader_throughput import describe
from clap_ds.distributed import error_file, init, watchdog
from clap_ds.distributed.accelerator import CORES
from clap_ds.distributed.collectives import gather, raise_on_all_ranks, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.engine.compile import compile_towers, set_compile_cache, what_to_compile
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.exit_handling import record_outcome
from clap_ds.engine.kernel_fallback import fall_back
from clap_ds.engine.metric_logger import Scalars
from clap_ds.model.clap import ClapModel
from clap_ds.run_records import environment, gpu_monitor
from clap_ds.run_records.metrics_schema import Environment
from clap_ds.run_records.run_dir import RunDirectory, quiet_deepspeed, start_log


def init_process_group(run: RunSettings, ranks: Ranks) -> torch.device:
    """Join the process group and return this rank's device. Raises UserError, on every rank if any rank finds a mistake."""
    timeout_s = 300 if run.clap.debug.enabled else init.COLLECTIVE_TIMEOUT_S
    device = init.initialize(ranks, collective_timeout_s=timeout_s)
    with quiet_deepspeed(), raise_on_all_ranks():
        check_deepspeed_sections(run.deepspeed, run.path)
    return device


def check_deepspeed_sections(deepspeed: dict[str, Any], path: Path) -> None:
    """Raise ValueError for mistakes that DeepSpeed would find later on one rank alone, while the others wait."""
    for problem in missing_monitors(deepspeed):
        raise ValueError(f"{path}: {problem}")
    try:
        DeepSpeedConfig(dict(deepspeed))
    except Exception as error:
        raise ValueError(f"{path}: DeepSpeed rejects the configuration: {error}") from None


@contextmanager
def open_run_dir(run: RunSettings, ranks: Ranks, device: torch.device) -> Iterator[RunDirectory]:
    """Open the run directory with its first files. In the body the watchdog runs, and the run's end is recorded."""
    kernels = report(run.clap.cpu_kernels) if device.type == "cpu" else None
    here = environment.environment(device, kernels)
    everywhere = gather((here["host"], here["device_name"]))
    with raise_on_all_ranks():
        record = RunDirectory(run_on_rank0(lambda: _describe(run, ranks, here, everywhere)))
    if ranks.is_main_process:
        record.update_summary(device_type=device.type)
        if ranks.job_folder is not None:
            write_atomically(ranks.job_folder / "run_directory", f"{record.path}\n")
        print(f"run directory: {record.path}", flush=True)
        print(f"ranks: {ranks.world_size}, nodes: {len({host for host, _ in everywhere})}", flush=True)
        if device.type == "cpu" and run.precision == "bf16":
            print(f"CPU kernels: {kernels}", flush=True)
    error_file.set_error_dir(record.path, ranks.rank, ranks.host)
    if not run.clap.debug.enabled:  # a debugger may hold a rank for hours
        watchdog.start(record.path, ranks.rank, ranks.host)
    with record_outcome(record, ranks, f"micro-batch {run.micro_batch} on {environment.device_name(device)}"):
        yield record
    record.close()


def _describe(run: RunSettings, ranks: Ranks, here: Environment, everywhere: list[tuple[str, str]]) -> Path:
    """Create the run directory with its first files; `everywhere` lists each rank's host and device."""
    root, sizes = run.clap.output.dir, run.batch_sizes(ranks.world_size)
    per_host = Counter(host for host, _ in everywhere)
    places = {"world_size": ranks.world_size, "num_nodes": len(per_host), "hosts": [*per_host]}
    places |= {"gpus_per_node": [*per_host.values()], "device_names": sorted({name for _, name in everywhere})}
    try:
        record = RunDirectory(RunDirectory.create(Path(root), run.run_name).path.resolve())
        start_log(record.path / "rank0.log")
        record.write_json("config.json", run.resolved())
        record.write_json("environment.json", {**here, **places})
    except OSError as error:
        raise ValueError(f"{run.path}: clap.output.dir: {root!r} can't be written: {error.strerror}") from None
    record.update_summary(
        state="running",
        error=None,
        preset=run.clap.preset().name,
        num_nodes=len(per_host),
        world_size=ranks.world_size,
        micro_batch_per_gpu=sizes.micro_batch,
        gradient_accumulation_steps=sizes.accumulation_steps,
        global_batch=sizes.global_batch,
        context_length=run.clap.context_length,
        text_packing=run.clap.text_packing,
        precision=run.precision,
        device_name=" and ".join(sorted({name for _, name in everywhere})),
    )
    return record.path


def build_engine(
    run: RunSettings, model: ClapModel, ranks: Ranks, device: torch.device, record: RunDirectory
) -> ClapEngine:
    """Build the engine around the model and choose its kernels. A collective."""
    with quiet_deepspeed(), raise_on_all_ranks():
        engine = ClapEngine(run, model, device)
    if device.type == "cuda":
        set_compile_cache()
        autocast = run.precision.startswith("torch_autocast")
        kernels = fall_back(run.clap.model, engine.model, autocast=autocast)
        if ranks.is_main_process:
            record.update_summary(kernels=kernels)
    # Ranks have the same weights, but different dropout and augmentation.
    torch.manual_seed(run.clap.seed + 1 + ranks.rank)
    return engine


@dataclass
class Session:
    """Hold what a run's steps need."""

    run: RunSettings
    ranks: Ranks
    device: torch.device
    record: RunDirectory
    engine: ClapEngine
    batches: BatchSource
    scalars: Scalars
    throughput_reported: bool = False

    def record_data(self) -> None:
        """Record statistics of the data; record and print samples that any rank couldn't use. A collective."""
        found = gather(self.batches.statistics())
        broken = {each["name"]: each for of_rank in found for each in of_rank.get("broken_items", ())}
        if self.ranks.is_main_process:
            shown = list(broken.values())[:5]
            self.record.update_summary(data={**found[0], "num_broken_items": len(broken), "broken_items": shown})
            if shown:
                examples = printable("; ".join(f"{each['name']}: {each['reason']}" for each in shown))
                print(f"warning: {len(broken)} item(s) or tar(s) could not be used, the first: {examples}", flush=True)

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples per rank and optimizer step."""
        return self.run.batch_sizes(self.ranks.world_size).global_batch // self.ranks.world_size

    def warn_if_data_bound(self, rates: Iterable[float]) -> None:
        """Print once, on rank 0, whether the loader keeps up with the fastest of several steps, given their `rates` in clips/s
        without waiting for data."""
        rates, throughput = [*rates], self.batches.throughput()
        if not self.throughput_reported and self.ranks.is_main_process and throughput is not None and len(rates) > 1:
            print(describe(throughput, max(rates), ranks_per_host=self.ranks.local_world_size, cores=CORES), flush=True)
            self.throughput_reported = True


@contextmanager
def train_session(
    run: RunSettings,
    ranks: Ranks,
    record: RunDirectory,
    engine: ClapEngine,
    *,
    data_state: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> Iterator[Session]:
    """Open what steps need, with data from `data_state` on and TensorBoard's files in `folder` (None: the run directory)."""
    scalars = Scalars(engine.deepspeed, run.deepspeed.get("tensorboard", {}), folder or record.path)
    with raise_on_all_ranks():
        batches = build_batches(
            run.clap.data,
            model=run.clap.preset(),
            context_length=run.clap.context_length,
            micro_batch=run.micro_batch,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=run.clap.seed,
            device=engine.device,
            pack_captions=run.clap.text_packing,
            state=data_state,
            needs_epochs=run.clap.train.epochs is not None,
        )
    with batches, gpu_monitor.watching(record.path if ranks.local_rank == 0 else None, ranks.local_world_size):
        try:
            if (what := what_to_compile(run.clap.compile, engine.device)) != "off":
                cached = run.clap.train.accumulation == "gradcache"
                compiled = compile_towers(engine.deepspeed, batches.peek(), what, cached=cached)
                if ranks.is_main_process:
                    record.update_summary(compiled)
            yield (session := Session(run, ranks, engine.device, record, engine, batches, scalars))
        finally:
            watchdog.ending()
            scalars.write()
        if run.deepspeed.get("comms_logger", {}).get("enabled"):
            log_summary()
        session.record_data()
