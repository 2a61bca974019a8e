"""Check that all scalars are written with DeepSpeed's monitor, in order."""

import errno
import io
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clap_ds.engine.deepspeed_compat import defer_monitor_events
from clap_ds.metrics.tensorboard import Scalars
from clap_ds.model.clap import ClapModel
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of, micro_batches, settings


def _engine(samples: int, monitor: MonitorMaster, config: dict[str, Any]) -> Any:
    deepspeed = SimpleNamespace(global_samples=samples, monitor=monitor)
    defer = partial(defer_monitor_events, deepspeed)
    return SimpleNamespace(deepspeed=deepspeed, config=config, defer_monitor_events=defer)


def _two_starts(folder: str, section: dict[str, Any]) -> list[bool]:
    """Write steps 1 to 4 of 10 samples each, then, as if resumed from step 3, steps 4 to 7, with
    DeepSpeed's scalars."""
    enabled = []
    for samples in (0, 30):
        monitor = MonitorMaster(
            get_monitor_config({"tensorboard": section | {"enabled": False}})
        )  # as in `factory.wrap`
        scalars = Scalars(_engine(samples, monitor, {"tensorboard": section}), Path(folder))
        enabled.append(monitor.enabled)
        for step in range(samples // 10 + 1, samples // 10 + 5):
            if monitor.enabled:
                monitor.write_events([("Train/Samples/lr", step / 100, 10 * step)])
            scalars.write([("train/loss", samples + step / 10, 10 * step)])
    return enabled


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({}, "tensorboard"),
        ({"enabled": True, "output_path": "OWN", "job_name": "mine"}, "own/mine"),
    ],
)
def test_a_resumed_run_has_one_course(
    one_rank: RankPool, tmp_path: Path, section: dict[str, Any], place: str
) -> None:
    section = {
        name: str(tmp_path / "own") if value == "OWN" else value for name, value in section.items()
    }
    (enabled,) = one_rank.run(_two_starts, str(tmp_path), section)
    assert enabled == [section.get("enabled", False)] * 2
    assert [path.parent for path in tmp_path.rglob("events*")] == [tmp_path / place] * 2
    events = EventAccumulator(str(tmp_path / place))
    events.Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    steps = [(10 * step, (step > 3) * 30 + step / 10) for step in range(1, 8)]
    expected = {"train/loss": steps} | (
        {"Train/Samples/lr": [(n, n / 1000) for n, _ in steps]} if enabled[0] else {}
    )
    assert found == {
        tag: [(n, pytest.approx(value)) for n, value in rows] for tag, rows in expected.items()
    }


def _write_to_failing_disk(folder: str) -> str:
    """Return what is printed while TensorBoard's file can't be written."""
    scalars = Scalars(_engine(0, MonitorMaster(get_monitor_config({})), {}), Path(folder))
    writer: Any = scalars._tensorboard
    asynchronous = writer.file_writer.event_writer._async_writer
    failure = OSError(errno.EROFS, "Read-only file system")
    with (
        redirect_stderr(io.StringIO()) as shown,
        mock.patch.object(asynchronous._writer, "write", side_effect=failure),
    ):
        scalars.write([("train/loss", 1.0, 1)])
        asynchronous._worker.join(60)
        scalars.write([("train/loss", 1.0, 2)])
    return shown.getvalue()


def test_a_failing_disk_costs_a_warning(one_rank: RankPool, tmp_path: Path) -> None:
    (shown,) = one_rank.run(_write_to_failing_disk, str(tmp_path))
    assert shown.count("\n") == 1
    assert "Read-only file system" in shown


def _two_histograms(folder: str) -> dict[str, tuple[float, ...]]:
    """Take three steps of SGD at rate 0.1. Return size, minimum and maximum of each parameter and
    gradient at the second."""
    run = settings()
    found = {}
    engine = engine_of(run, ClapModel(run.clap.preset()))
    batches = iter(micro_batches(run, 0, 1, 3))
    with Scalars(engine, Path(folder), 2):
        for step in (1, 2, 3):
            before = {
                name: parameter.clone() for name, parameter in engine.model.named_parameters()
            }
            engine.step(batches)
            for name, parameter in engine.model.named_parameters() if step == 2 else ():
                found[f"parameters/{name}"] = before[name]
                found[f"gradients/{name}"] = (before[name] - parameter) / 0.1
    return {
        tag: (each.numel(), each.min().item(), each.max().item()) for tag, each in found.items()
    }


def test_histograms_of_parameters_and_gradients(one_rank: RankPool, tmp_path: Path) -> None:
    (expected,) = one_rank.run(_two_histograms, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert {*events.Tags()["histograms"]} == {*expected}
    for tag, (count, low, high) in expected.items():
        (event,) = events.Histograms(tag)
        found = event.histogram_value
        assert (event.step, found.num, sum(found.bucket)) == (6, count, count), tag
        assert (found.min, found.max) == (
            pytest.approx(low, rel=1e-3, abs=1e-5),
            pytest.approx(high, rel=1e-3, abs=1e-5),
        )
