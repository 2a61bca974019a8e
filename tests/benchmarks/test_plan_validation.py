"""Predicted rates and shares with known values, and each kind of published row at a small size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.plan_validation import STEPS, compared, idle_text, main, published_rows, render, step_of
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning.roofline import CASES, fused, rates_of
from clap_ds.planning.roofline_shares import FUSED, TABLE
from clap_ds.planning.step import trace_step
from clap_ds.planning.tracing import Operation
from tests.conftest import micro_run

KINDS = {
    tuple(str(row[name]) for name in ("class", "precision", "attention", "compiled", "optimizer")): row
    for row in published_rows()
}
LOW = (torch.float16, torch.bfloat16)
SMALL = {"DonutSwin": {"depths": [1] * 4}, "GPT2": {"n_layer": 1}}


def test_the_ratio_is_what_a_known_law_gives() -> None:
    row = {**published_rows()[2], "device": "h100-sxm", "batch": 6, "accumulation": 2, "rate": 100.0}
    product, moved = ((2**12, 2**12), (2**12, 2**12)), ((1, 335 * 10**8),)  # 20 and 10 ms at data-sheet rates
    once = Operation("aten.mm", "model", False, 989 * 10**10, (), (), True, torch.bfloat16, product)
    found = compared(row, [(once, 2), (Operation("aten.mul", "model", False, 0, moved, (), True, torch.bfloat16), 1)])
    for case in CASES:
        seconds = 0.02 / getattr(TABLE["wide product"], case) + 0.01 / getattr(TABLE["element-wise"], case)
        assert found["predicted_rate"][case] == pytest.approx(12 / seconds, rel=1e-3)
    assert found["ratio"] == found["predicted_rate"]["middle"] / 100


@pytest.mark.parametrize("row", KINDS.values(), ids=map(" ".join, KINDS))
def test_every_kind_of_row_can_be_recorded(row: dict[str, Any]) -> None:
    small = next((sizes for name, sizes in SMALL.items() if row["class"].startswith(name)), {"num_hidden_layers": 1})
    row = {**row, "sizes": row["sizes"] | small, "batch": 2, "predicted": min(row["predicted"], 8)}
    row |= {"model": "micro", "sizes": {}} if row["class"] == "ClapModel" else {}
    row |= {} if row["unit"] == "images/s" else {"size": 16}
    work = step_of(row)
    flops = {way: sum(op.flops for op, _ in work if op.backward == way and op.dtype in LOW) for way in (0, 1)}
    assert 1.4 < flops[1] / flops[0] <= 2.5  # some need no gradient, some are recomputed
    assert any(each.name == "fused" for each, _ in work) == (row["compiled"] == "yes")
    assert any("scaled_dot_product" in each.name for each, _ in work) == (row["attention"] == "sdpa")
    if row["class"] == "ClapModel":
        found = compared(row, work)
        frames, bins = load_preset("micro").audio.feature_shape
        assert found["copies"] == 4 * row["batch"]
        assert found["copies_gb_a_sample"] == pytest.approx(4 * 2 * row["batch"] * frames * bins * 4 / 1e9)
        assert 0 < found["copies_ms"] < found["predicted_ms"]
        unexplained = found["published_ms"] - found["predicted_ms"]
        assert f"{unexplained:.2f} unexplained" in render([found])


def invent(folder: Path, what: str, share: float) -> None:
    """Return a profile on an H200 in which all planned kernels reach this share, with unplanned copies."""
    folder.mkdir()
    model = {"preset": "micro", "attention_impl": "sdpa", "mlp_impl": "torch"}
    (folder / "config.json").write_text(json.dumps(micro_run(clap={"compile": what, "model": model})))
    operations = trace_step(load_run(folder / "config.json", 1), 4).recorded.operations
    summary = {"device_name": "NVIDIA H200", "device_type": "cuda"} | ({"compiled": {}} if what == "towers" else {})
    (folder / "summary.json").write_text(json.dumps(summary))
    events: list[Any] = [(None, "Memcpy HtoD", [], [["Memcpy HtoD", 7.0]])]
    for operation in (fused(operations) if what == "towers" else operations) * STEPS:
        us = 1e6 * rates_of(GPUS["h200"], "low").ideal_s(operation) / share
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
