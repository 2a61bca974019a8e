"""Shares of profiles with known values, and the device's idle time."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_validation import STEPS, idle_text, main
from clap_ds.config.errors import UserError
from clap_ds.config.settings import load_run
from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning.roofline import FUSED, TABLE, ideal_s
from clap_ds.planning.step import compiled_kernels, trace_step
from tests.conftest import micro_run


def invent(folder: Path, what: str, share: float) -> None:
    """Return a profile on an H200 in which all planned kernels reach this share, with unplanned copies."""
    folder.mkdir()
    model = {"preset": "micro", "attention_impl": "sdpa", "mlp_impl": "torch"}
    (folder / "config.json").write_text(json.dumps(micro_run(clap={"compile": what, "model": model})))
    run = load_run(folder / "config.json", 1)
    work = trace_step(run, 4).work(compiled_kernels(run, 4) if what == "towers" else [])
    summary = {"device_name": "NVIDIA H200", "device_type": "cuda"} | ({"compiled": {}} if what == "towers" else {})
    (folder / "summary.json").write_text(json.dumps(summary))
    events: list[Any] = [(None, "Memcpy HtoD", [], [["Memcpy HtoD", 7.0]])]
    for operation in [each for each, _ in work] * STEPS:
        us = 1e6 * ideal_s(operation, GPUS["h200"]) / share
        if operation.name == "fused" or operation.name.startswith("compiled."):
            events.append((None, "## Call CompiledFxGraph", [], [["triton_red_fused_add_3", us]]))
        elif us:  # includes work of another planned operation
            shapes = [[], *operation.shapes, *([[4]] if operation.name == "aten.mm" else [])]
            events.append((None, operation.name.replace(".", "::"), shapes, [["first(int)", us / 4]]))
            events.append((len(events) - 1, "aten::mm", [[64, 32], [32, 32]], [["second", 3 * us / 4]]))
    (folder / "profile.json").write_text(json.dumps({"events": events}))


def test_every_class_has_the_share_that_its_kernels_reach(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile\.json"):
        main(["--profiles", str(tmp_path)])
    invent(tmp_path / "eager", "off", 0.0005)
    invent(tmp_path / "compiled", "towers", 0.00025)
    main(["--profiles", str(tmp_path), "--output", str(tmp_path / "efficiencies.md")])
    found = json.loads((tmp_path / "efficiencies.json").read_text())
    assert found["device"] == "NVIDIA H200"
    shares = {name: each["efficiency"] for name, each in found["classes"].items()}
    assert {FUSED, "thin product", "attention", "other product", "optimizer"} <= shares.keys() <= TABLE.keys()
    assert shares.pop(FUSED) == pytest.approx(0.00025)
    assert list(shares.values()) == pytest.approx([0.0005] * len(shares))
    assert (tmp_path / "efficiencies.md").read_text().count("not in the plan: Memcpy HtoD") == 2


def test_idle_time_is_that_between_kernels_of_the_busiest_stream() -> None:
    def kernel(name: str, start: float, length: float, stream: int = 7) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": length, "args": {"stream": stream}}

    work = [kernel("a", 0, 1000), kernel("b", 5000, 1000), kernel("c", 6000, 500), kernel("copy", 0, 9000, stream=20)]
    text = idle_text({"traceEvents": [*work, {"cat": "cpu_op", "name": "aten::mm", "ts": 1000, "dur": 4000}]})
    assert "Idle 2.0 ms per step" in text
    assert "longest 4.0 ms, between `a` and `b`" in text
