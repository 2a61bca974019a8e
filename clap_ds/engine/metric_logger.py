"""Write DeepSpeed's and our scalars with DeepSpeed's monitor (TensorBoard, CSV, Weights & Biases, Comet)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from deepspeed.monitor.config import TensorBoardConfig
from deepspeed.monitor.tensorboard import TensorBoardMonitor

from clap_ds.config.files import own_folder
from clap_ds.distributed.collectives import rank
from clap_ds.engine.engine import ClapEngine
from clap_ds.run_records.jsonl import warn_on_disk_full

Scalar = tuple[str, float, int]  # tag, value, samples trained on so far


class Scalars:
    """Defer the writes of DeepSpeed's monitor from the timed steps to `write`, in the order of samples. If the `tensorboard`
    section has no output path, files go to `tensorboard` in `folder`."""

    def __init__(self, engine: ClapEngine, folder: Path) -> None:
        section, deepspeed = engine.config.get("tensorboard", {}), engine.deepspeed
        monitor, placed_here = deepspeed.monitor, "output_path" not in section and section.get("enabled", True)
        if placed_here:
            place = {"output_path": str(folder), "job_name": section.get("job_name", "tensorboard")}
            with warn_on_disk_full(folder / place["job_name"]):
                if rank() == 0:
                    with own_folder(folder / place["job_name"]):  # TensorBoard would follow a link
                        pass
                    monitor.tb_monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, **place))
            monitor.enabled |= "enabled" in section  # whether DeepSpeed also writes
        if monitor.tb_monitor is not None and (placed_here or deepspeed.global_samples > 0):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

            # Make TensorBoard discard entries of samples that will be trained on again.
            event = Event(step=deepspeed.global_samples + 1, session_log=SessionLog(status=SessionLog.START))
            monitor.tb_monitor.summary_writer.file_writer.add_event(event)
        self._waiting: list[Scalar] = []
        self._write, monitor.write_events = monitor.write_events, self._waiting.extend

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()

    def write(self, scalars: Iterable[Scalar] = ()) -> None:
        """Write these and DeepSpeed's deferred scalars, on rank 0 only."""
        events = sorted([*self._waiting, *scalars], key=lambda scalar: scalar[2])
        self._waiting.clear()
        with warn_on_disk_full("DeepSpeed's monitor output"):
            self._write(events)
