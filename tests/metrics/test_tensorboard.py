"""TensorBoard has all scalars, DeepSpeed's included, in order."""

import errno
import io
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clap_ds.engine.deepspeed_compat import defer_monitor_events
from clap_ds.metrics.tensorboard import Scalars
from clap_ds.model.clap import ClapModel
from tests.training.reference_steps import engine_of, micro_batches, settings


def _engine(samples: int, section: dict[str, Any]) -> Any:
    """Return what `Scalars` uses of an engine, with DeepSpeed's monitor as `factory.wrap` leaves
    it."""
    monitor = MonitorMaster(get_monitor_config({"tensorboard": section | {"enabled": False}}))
    deepspeed = SimpleNamespace(global_samples=samples, monitor=monitor)
    return SimpleNamespace(
        deepspeed=deepspeed,
        config={"tensorboard": section},
        defer_monitor_events=partial(defer_monitor_events, deepspeed),
    )


def _start_twice(folder: str, section: dict[str, Any]) -> None:
    """Write steps 1 to 4 of 10 samples each, then, as if resumed from step 3, steps 4 to 7, with
    DeepSpeed's scalars."""
    for first_step in (1, 4):
        samples = 10 * (first_step - 1)
        engine = _engine(samples, section)
        scalars = Scalars(engine, Path(folder))
        monitor = engine.deepspeed.monitor
        assert monitor.enabled == section.get("enabled", False)
        for step in range(first_step, first_step + 4):
            if monitor.enabled:
                monitor.write_events([("Train/Samples/lr", float(step), 10 * step)])
            scalars.write([("train/loss", samples + step, 10 * step)])


def _scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        scalars[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return scalars


# Steps 4 to 7 are the second start's, from 30 samples on.
LOSSES = [(10, 1), (20, 2), (30, 3), (40, 34), (50, 35), (60, 36), (70, 37)]


def test_scalars_of_resumed_run_continue_those_before_with_deepspeeds(one_rank, tmp_path):
    folder = tmp_path / "own"
    section = {"enabled": True, "output_path": str(folder), "job_name": "mine"}
    one_rank.run(_start_twice, str(tmp_path), section)
    assert {path.parent for path in tmp_path.rglob("events*")} == {folder / "mine"}
    rates = [(10 * step, step) for step in range(1, 8)]
    assert _scalars_in(folder / "mine") == {"train/loss": LOSSES, "Train/Samples/lr": rates}


def _write_to_failing_disk(folder: str) -> str:
    """Return what is printed while TensorBoard's file can't be written."""

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    scalars = Scalars(_engine(0, {}), Path(folder))
    writer: Any = scalars._tensorboard
    asynchronous = writer.file_writer.event_writer._async_writer
    with redirect_stderr(io.StringIO()) as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setattr(asynchronous._writer, "write", fail)
        scalars.write([("train/loss", 1.0, 1)])
        asynchronous._worker.join(60)
        scalars.write([("train/loss", 1.0, 2)])
    return stderr.getvalue()


def test_scalars_on_failing_disk_print_one_warning(one_rank, tmp_path):
    (stderr,) = one_rank.run(_write_to_failing_disk, str(tmp_path))
    assert stderr.count("\n") == 1
    assert "Read-only file system" in stderr


def _write_histograms(folder: str) -> dict[str, tuple[float, float]]:
    """Take two steps of SGD at rate 0.1. Return minimum and maximum of each parameter and gradient
    at the second."""
    run = settings()
    engine = engine_of(run, ClapModel(run.clap.preset()))
    batches = iter(micro_batches(run, 0, 1, 2))
    limits = {}
    with Scalars(engine, Path(folder), 2):
        engine.step(batches)
        weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        engine.step(batches)
        for name, parameter in engine.model.named_parameters():
            gradient = (weights[name] - parameter.detach()) / 0.1
            for tag, tensor in (("parameters", weights[name]), ("gradients", gradient)):
                limits[f"{tag}/{name}"] = (tensor.min().item(), tensor.max().item())
    return limits


def test_histograms_are_of_parameters_and_gradients(one_rank, tmp_path):
    (expected,) = one_rank.run(_write_histograms, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert {*events.Tags()["histograms"]} == {*expected}
    for tag, limits in expected.items():
        (event,) = events.Histograms(tag)
        histogram = event.histogram_value
        assert event.step == 6
        assert (histogram.min, histogram.max) == pytest.approx(limits, rel=1e-3, abs=1e-5), tag
