"""The published tables against arithmetic done here in decimals, apart from the code under test."""

import csv
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.published import (
    PUBLISHED_DIR,
    claim_follows,
    published_mfu_percent,
    rate_bounds,
    read_facts,
    rounding_bounds,
)
from clap_ds.analysis.table import format_cell, read_table_runs

COST = {"jupiter_htsat_tiny": Decimal("111.20"), "jupiter_htsat_base": Decimal("130.09")}
NOT_FOLLOWING = {
    ("jupiter_htsat_base", "8", "scaling_efficiency_percent"): "97.0",
    ("jupiter_htsat_base", "64", "mfu_percent"): "19.2",
    ("jupiter_htsat_base", "128", "mfu_percent"): "17.9",
}
"""Digits that the published samples/s contradict, and what those give: 521.9/538.2, and 485.3 and 454.8 × 3 × 130.09."""


def published_rows(stem: str) -> list[dict[str, str]]:
    with (PUBLISHED_DIR / f"{stem}.csv").open() as table:
        return list(csv.DictReader(table))


@pytest.mark.parametrize("stem", COST)
def test_every_published_digit_is_reproduced_but_for_those_that_do_not_follow(stem: str) -> None:
    rows = scaling_table(read_table_runs(PUBLISHED_DIR / f"{stem}.csv"))
    for row, published in zip(rows, published_rows(stem), strict=True):
        for column, text in published.items():
            expected = NOT_FOLLOWING.get((stem, published["nodes"], column), text)
            assert format_cell(column, getattr(row, column)) == expected, (published["nodes"], column)
            assert (f"{column} {text}" in row.notes) == (expected != text)


@pytest.mark.parametrize("stem", COST)
def test_the_digits_that_do_not_follow_are_those_decimal_arithmetic_finds(stem: str) -> None:
    # Apart from the code: widest possible range of each number from the rounding of the two rates, in exact decimals.
    rows, found = published_rows(stem), set()
    half = Decimal("0.05")
    base = Decimal(rows[0]["samples_per_s_per_gpu"])
    tenth = Decimal("0.1")
    for row in rows:
        rate = Decimal(row["samples_per_s_per_gpu"])
        low, high = rate - half, rate + half
        total_low, total_high = Decimal(row["samples_per_s"]) - half * 10, Decimal(row["samples_per_s"]) + half * 10
        low, high = max(low, total_low / int(row["gpus"])), min(high, total_high / int(row["gpus"]))
        ranges = {
            "mfu_percent": [100 * 3 * COST[stem] * value / 989000 for value in (low, high)],
            "scaling_efficiency_percent": [100 * low / (base + half), 100 * high / (base - half)],
        }
        for column, (least, most) in ranges.items():
            rounded = {value.quantize(tenth, ROUND_HALF_UP) for value in (least, most)}
            if row["nodes"] != "1" and not min(rounded) <= Decimal(row[column]) <= max(rounded):
                found.add((stem, row["nodes"], column))
    assert found == {key for key in NOT_FOLLOWING if key[0] == stem}


def test_mfu_is_absent_for_an_unknown_gpu_or_model() -> None:
    assert published_mfu_percent("htsat_tiny_roberta_base", 623.7, None) is None
    assert published_mfu_percent("micro", 623.7, 989.0) is None
    assert published_mfu_percent("htsat_tiny_roberta_base", 623.7, 989.0) == pytest.approx(21.038, abs=5e-4)


def test_rounding_bounds() -> None:
    assert rounding_bounds("97.3") == pytest.approx((97.25, 97.35))
    assert rounding_bounds("2153") == pytest.approx((2152.5, 2153.5))


def test_rate_bounds_use_both_columns_and_fall_back_when_they_contradict() -> None:
    assert rate_bounds("616.5", "9865", 16) == pytest.approx((9864.5 / 16, 616.55))
    assert rate_bounds("616.5", "9000", 16) == pytest.approx((616.45, 616.55))
    assert rate_bounds("616.5", "", 16) == pytest.approx((616.45, 616.55))


def test_claim_follows_at_the_edge() -> None:
    assert claim_follows("97.0", 96.5, 96.96)
    assert not claim_follows("97.0", 96.5, 96.94)


def test_tables_are_recognised_by_name() -> None:
    facts = read_facts(Path("elsewhere/jupiter_htsat_base.csv"))
    assert facts is not None
    assert (facts.model, facts.micro_batch_per_gpu) == ("htsat_base_roberta_base", 416)
    assert read_facts(Path("mine.csv")) is None
