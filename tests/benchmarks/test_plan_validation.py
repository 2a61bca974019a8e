"""Efficiencies of profiles with known values, and the device's idle time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import plan_validation
from benchmarks.plan_validation import STEPS, describe_idle, main
from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning.roofline import FUSED, ideal_s
from clap_ds.planning.tracing import Operation
from clap_ds.utils.errors import UserError
from tests.conftest import micro_run

PRODUCT = Operation(
    "aten.mm", "text", False, 2 * 64 * 32 * 32, 16384, torch.bfloat16, ((64, 32), (32, 32))
)
PLANNED = [
    PRODUCT,
    PRODUCT._replace(name="aten.bmm", shapes=((2, 64, 32), (2, 32, 32))),
    Operation("clap.window_attention", "audio", True, 0, 9000, torch.bfloat16, ((4, 8), (2, 2))),
]
KERNELS = [Operation("fused", "audio", False, 0, 5000)]


def write_profile(folder: Path, compile_mode: str, efficiency: float) -> None:
    """Write a profile on an H200 in which all planned kernels have this efficiency, with unplanned
    copies."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(micro_run(clap={"compile": compile_mode})))
    summary: Any = {"device_name": "NVIDIA H200", "device_type": "cuda"}
    operations = PLANNED
    if compile_mode == "towers":
        summary["compiled"] = {}
        operations = [*PLANNED, *KERNELS]
    (folder / "summary.json").write_text(json.dumps(summary))
    # Index of the caller, name, shapes, and kernels with their microseconds.
    events: list[Any] = [(None, "Memcpy HtoD", [], [["Memcpy HtoD", 7.0]])]
    for operation in operations * STEPS:
        us = 1e6 * ideal_s(operation, GPUS["h200"]) / efficiency
        if operation.name == "fused":
            events.append((None, "## Call CompiledFxGraph", [], [["triton_red_fused_add_3", us]]))
            continue
        shapes: list[Any] = [[], *operation.shapes]
        if operation.name == "aten.mm":
            # An `out=`.
            shapes.append([4])
        name = operation.name.replace(".", "::")
        events.append((None, name, shapes, [["first(int)", us / 4]]))
        # It calls another planned operation, whose time is its own.
        caller = len(events) - 1
        events.append((caller, "aten::mm", [[64, 32], [32, 32]], [["second", 3 * us / 4]]))
    (folder / "profile.json").write_text(json.dumps({"events": events}))


def test_efficiency_of_each_class_is_that_of_its_kernels(tmp_path, monkeypatch):
    step = SimpleNamespace(
        work=lambda fused: [(operation, 1.0) for operation in [*PLANNED, *fused]]
    )
    monkeypatch.setattr(plan_validation, "trace_step", lambda *_, **__: step)
    monkeypatch.setattr(plan_validation, "compiled_kernels", lambda *_: KERNELS)
    with pytest.raises(UserError, match=r"profile\.json"):
        main(["--profiles", str(tmp_path)])
    write_profile(tmp_path / "eager", "off", 0.0005)
    write_profile(tmp_path / "compiled", "towers", 0.00025)
    main(["--profiles", str(tmp_path), "--output", str(tmp_path / "efficiencies.md")])
    result = json.loads((tmp_path / "efficiencies.json").read_text())
    assert result["device"] == "NVIDIA H200"
    efficiencies = {name: figures["efficiency"] for name, figures in result["classes"].items()}
    eager = ("thin product", "other product", "narrow window attention")
    assert efficiencies == pytest.approx(dict.fromkeys(eager, 0.0005) | {FUSED: 0.00025})
    assert (tmp_path / "efficiencies.md").read_text().count("not in the plan: Memcpy HtoD") == 2


def test_idle_time_is_between_kernels_of_the_busiest_stream():
    events: list[dict[str, Any]] = []
    kernels = (("a", 0, 1000, 7), ("b", 5000, 1000, 7), ("c", 6000, 500, 7), ("copy", 0, 9000, 20))
    for name, start, duration, stream in kernels:
        times = {"ts": start, "dur": duration}
        events.append({"cat": "kernel", "name": name, **times, "args": {"stream": stream}})
    text = describe_idle({"traceEvents": events})
    assert "Idle 2.0 ms per step" in text
    assert "longest 4.0 ms, between `a` and `b`" in text
