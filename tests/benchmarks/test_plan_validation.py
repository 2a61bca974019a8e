"""An invented row whose law is known, the table of published rates, and each kind of row in it recorded at a small size."""

from typing import Any

import pytest
import torch

from benchmarks.plan_validation import compared, published_rows, render, step_of
from clap_ds.planning.efficiency import TABLE
from clap_ds.planning.roofline import CASES
from clap_ds.planning.trace import Operation

ROWS = published_rows()
KINDS = {
    tuple(str(row[name]) for name in ("class", "precision", "attention", "compiled", "optimizer")): row for row in ROWS
}
SMALL = {"DonutSwin": {"depths": [1] * 4}, "GPT2": {"n_layer": 1}}
ROW: dict[str, Any] = {**ROWS[0], "device": "h100-sxm", "batch": 6, "accumulation": 2, "rate": 100.0}


def test_the_ratio_is_what_a_known_law_gives() -> None:
    product, copied = ((2**12, 2**12), (2**12, 2**12)), ((1, 335 * 10**8),)  # 20 and 10 ms at the data sheet's rates
    once = Operation("aten.mm", "model", False, 989 * 10**10, (), (), True, torch.bfloat16, product)
    copy = Operation("aten.mul", "model", False, 0, copied, (), True, torch.bfloat16)
    found = compared(ROW, [(once, 2), (copy, 1)])
    wide, moved = TABLE["wide product"], TABLE["element-wise"]
    for case in CASES:
        seconds = 0.02 / getattr(wide, case) + 0.01 / getattr(moved, case)
        assert found["predicted_rate"][case] == pytest.approx(12 / seconds, rel=1e-3)
    assert found["ratio"] == found["predicted_rate"]["middle"] / 100


def test_the_median_is_of_all_rows() -> None:
    rates = {"low": 90.0, "middle": 200.0, "high": 300.0}
    rows = [{**ROW, "ratio": ratio, "predicted_rate": rates} for ratio in (6.0, 1.0, 2.0)]
    rows[0] |= {"rate": 80.0}
    last = render(rows).splitlines()[-1]
    assert "**2.00** of 3 rows; 2 rates are in their interval" in last


@pytest.mark.parametrize("row", KINDS.values(), ids=map(" ".join, KINDS))
def test_every_kind_of_row_can_be_recorded(row: dict[str, Any]) -> None:
    small = next((sizes for name, sizes in SMALL.items() if row["class"].startswith(name)), {"num_hidden_layers": 1})
    row = {**row, "sizes": row["sizes"] | small, "batch": 2, "predicted": min(row["predicted"], 8)}
    row |= {"model": "micro", "sizes": {}} if row["class"] == "ClapModel" else {}
    row |= {} if row["unit"] == "images/s" else {"size": 16}
    operations = [operation for operation, _ in step_of(row)]
    backward = [each for each in operations if each.backward]
    all_flops, backward_flops = (
        sum(each.flops for each in some if each.dtype in (torch.float16, torch.bfloat16))
        for some in (operations, backward)
    )
    assert 1.4 < backward_flops / (all_flops - backward_flops) <= 2.5  # some need no gradient, some are computed again
    assert backward_flops > 0.9 * sum(each.flops for each in backward)
    assert [each.name for each in operations if each.part == "optimizer" and each.launches]
    assert any(each.name == "fused" for each in operations) == (row["compiled"] == "yes")
    assert any("scaled_dot_product" in each.name for each in operations) == (row["attention"] == "sdpa")
