"""Shares of the data sheet's rates, of profiles whose law is known."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import efficiencies
from clap_ds.config.errors import UserError
from clap_ds.config.settings import load_run
from clap_ds.flop_count.peaks import GPUS
from clap_ds.planning.efficiency import TABLE
from clap_ds.planning.roofline import fused, rates_of
from clap_ds.planning.step import trace_step
from tests.conftest import micro_run


def invent(folder: Path, what: str, share: float) -> tuple[float, float]:
    """A profile on an H200 where all kernels reach this share, and a ninth of what all of them take is copied by what no
    plan has. Returns the milliseconds a step of what a plan has, and of Inductor's kernels among them."""
    folder.mkdir()
    for attention in ("sdpa", "auto"):  # what the run chose, and what it was given
        model = {"preset": "micro", "attention": attention, "mlp": "torch"}
        (folder / "config.json").write_text(json.dumps(micro_run(clap={"compile": what, "model": model})))
        if attention == "sdpa":
            operations = trace_step(load_run(folder / "config.json", 1), 4).recorded.operations
    summary = {"device_name": "NVIDIA H200", "device_type": "cuda", "kernels": {"attention": {"kernel": "sdpa"}}}
    compiled = {"compiled": {"audio": None, "text": None}} if what == "towers" else {}
    (folder / "summary.json").write_text(json.dumps(summary | compiled))
    ideal_s = rates_of(GPUS["h200"], "low").ideal_s
    events: list[Any] = []
    for operation in (fused(operations) if what == "towers" else operations) * efficiencies.STEPS:
        us = 1e6 * ideal_s(operation) / share
        if operation.name == "fused" or operation.name.startswith("compiled."):
            events.append((None, "## Call CompiledFxGraph", [], [["triton_red_fused_add_3", us]]))
        elif us:  # with a caller, and a part that another operation of the plan does as well
            shapes = [[], *operation.shapes, *([[4]] if operation.name == "aten.mm" else [])]
            events.append((None, "autograd::engine::evaluate_function", [], []))
            events.append((len(events) - 1, operation.name.replace(".", "::"), shapes, [["first(int)", us / 4]]))
            events.append((len(events) - 1, "aten::mm", [[64, 32], [32, 32]], [["second", 3 * us / 4]]))
    total_us = sum(kernel[1] for *_, kernels in events for kernel in kernels)
    events.append((None, "Memcpy HtoD", [], [["Memcpy HtoD", total_us / 9]]))
    left = {"steps": efficiencies.STEPS, "events": events, "ceilings": {"GB/s of a copy": 4321.0}}
    (folder / "profile.json").write_text(json.dumps(left))
    inductors_us = sum(kernels[0][1] for _, name, _, kernels in events if name.startswith("#"))
    return total_us / efficiencies.STEPS / 1000, inductors_us / efficiencies.STEPS / 1000


def test_every_class_has_the_share_that_its_kernels_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager_ms, loss_ms = invent(tmp_path / "eager", "off", 0.0005)
    compiled_ms, _ = invent(tmp_path / "compiled", "towers", 0.00025)
    efficiencies.main([str(tmp_path), "--output", str(tmp_path / "x" / "efficiencies.md")])
    found = json.loads((tmp_path / "x" / "efficiencies.json").read_text())
    classes = found.pop("classes")
    assert list(found) == ["device", "made_by", "commit"]
    assert found["device"] == "NVIDIA H200"
    assert classes.keys() <= TABLE.keys()
    assert {"fused kernel", "thin product", "narrow attention", "FFT", "optimizer"} <= classes.keys()
    inductors = classes.pop("fused kernel")
    assert inductors["efficiency"] == pytest.approx(0.00025)
    assert all(each["efficiency"] == pytest.approx(0.0005) for each in classes.values())
    assert 1000 * sum(each["seconds"] for each in classes.values()) == pytest.approx(eager_ms - loss_ms)
    shown = " ".join(capsys.readouterr().out.split())
    for total_ms in (eager_ms, compiled_ms):
        assert f"{total_ms * 10 / 9:.1f} ms a step, 90.0% joined to the plan" in shown
    assert shown.count("by itself: 4,321.0 GB/s of a copy.") == 2
    assert shown.count(f"| Memcpy HtoD | – | Memcpy HtoD | 0.5 | {eager_ms / 9:.3f} | 10.0% | – | – | – |") == 1
    thin = classes["thin product"]
    assert f"| thin product | 0.1% | {1000 * thin['seconds']:.3f} | {thin['kernels']:g} |" in shown


def test_a_device_or_a_folder_without_what_is_needed_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no profile.json below it"):
        efficiencies.main([str(tmp_path)])
    invent(tmp_path / "eager", "off", 0.5)
    (tmp_path / "eager" / "summary.json").write_text('{"device_name": "NVIDIA T4", "device_type": "cuda"}')
    with pytest.raises(UserError, match=r"no rates for 'NVIDIA T4'"):
        efficiencies.main([str(tmp_path)])
    (tmp_path / "eager" / "summary.json").write_text('{"device_name": "NVIDIA H200", "device_type": "cuda"}')
    (tmp_path / "eager" / "profile.json").write_text(
        '{"steps": 2, "events": [[null, "aten::mm", [], []]], "ceilings": {}}'
    )
    with pytest.raises(UserError, match=r"profile.json: no kernel's time"):
        efficiencies.main([str(tmp_path)])
