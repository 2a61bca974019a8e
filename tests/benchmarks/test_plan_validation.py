"""Shares of profiles with known values, and the device's idle time."""

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


def invent(folder: Path, what: str, share: float) -> None:
    """Write a profile on an H200 in which all planned kernels reach this share, with unplanned
    copies."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(micro_run(clap={"compile": what})))
    summary = {"device_name": "NVIDIA H200", "device_type": "cuda"} | (
        {"compiled": {}} if what == "towers" else {}
    )
    (folder / "summary.json").write_text(json.dumps(summary))
    events: list[Any] = [(None, "Memcpy HtoD", [], [["Memcpy HtoD", 7.0]])]
    for operation in [*PLANNED, *(KERNELS if what == "towers" else [])] * STEPS:
        us = 1e6 * ideal_s(operation, GPUS["h200"]) / share
        if operation.name == "fused":
            events.append((None, "## Call CompiledFxGraph", [], [["triton_red_fused_add_3", us]]))
        else:  # includes work of another planned operation
            shapes = [[], *operation.shapes, *([[4]] if operation.name == "aten.mm" else [])]
            events.append(
                (None, operation.name.replace(".", "::"), shapes, [["first(int)", us / 4]])
            )
            events.append(
                (len(events) - 1, "aten::mm", [[64, 32], [32, 32]], [["second", 3 * us / 4]])
            )
    (folder / "profile.json").write_text(json.dumps({"events": events}))


def test_every_class_has_the_share_that_its_kernels_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = SimpleNamespace(work=lambda fused: [(each, 1.0) for each in [*PLANNED, *fused]])
    monkeypatch.setattr(plan_validation, "trace_step", lambda *_, **__: work)
    monkeypatch.setattr(plan_validation, "compiled_kernels", lambda *_: KERNELS)
    with pytest.raises(UserError, match=r"profile\.json"):
        main(["--profiles", str(tmp_path)])
    invent(tmp_path / "eager", "off", 0.0005)
    invent(tmp_path / "compiled", "towers", 0.00025)
    main(["--profiles", str(tmp_path), "--output", str(tmp_path / "efficiencies.md")])
    found = json.loads((tmp_path / "efficiencies.json").read_text())
    assert found["device"] == "NVIDIA H200"
    shares = {name: each["efficiency"] for name, each in found["classes"].items()}
    expected = dict.fromkeys(["thin product", "other product", "triton window attention"], 0.0005)
    assert shares == pytest.approx(expected | {FUSED: 0.00025})
    assert (tmp_path / "efficiencies.md").read_text().count("not in the plan: Memcpy HtoD") == 2


def test_idle_time_is_that_between_kernels_of_the_busiest_stream() -> None:
    def kernel(name: str, start: float, length: float, stream: int = 7) -> dict[str, Any]:
        return {
            "cat": "kernel",
            "name": name,
            "ts": start,
            "dur": length,
            "args": {"stream": stream},
        }

    work = [
        kernel("a", 0, 1000),
        kernel("b", 5000, 1000),
        kernel("c", 6000, 500),
        kernel("copy", 0, 9000, stream=20),
    ]
    text = describe_idle(
        {"traceEvents": [*work, {"cat": "cpu_op", "name": "aten::mm", "ts": 1000, "dur": 4000}]}
    )
    assert "Idle 2.0 ms per step" in text
    assert "longest 4.0 ms, between `a` and `b`" in text
