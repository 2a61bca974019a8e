"""Cost by hand: 1e9 samples at the published rates."""

from pathlib import Path

import pytest

from clap_ds.analysis import cost
from clap_ds.analysis.cost import Price, cheapest, costs, render
from clap_ds.analysis.csv_table import read_table
from clap_ds.analysis.table import Row
from clap_ds.config.errors import UserError
from tests.analysis.samples import TINY, command, record, running_log, write


@pytest.mark.parametrize(("deadline", "gpus"), [(None, 4), (200, 4), (60, 8), (5, 128), (1, 512), (0.9, None)])
def test_cheapest_scale_within_a_deadline(deadline: float | None, gpus: int | None) -> None:
    # Efficiency falls with scale, so the cheapest is the smallest that is in time.
    best = cheapest(costs(read_table(TINY), 1e9), deadline)
    assert (best.row.gpus if best else None) == gpus


def test_a_larger_scale_that_is_more_efficient_is_cheaper_and_rows_without_a_rate_are_passed_over() -> None:
    found = costs([Row(1, 4, 10.0, 40.0), Row(2, 8, 11.0, 88.0), Row(4, 16)], 1000)
    assert cheapest(found) is found[1]
    with pytest.raises(UserError, match="no scale"):
        costs([Row(2, 8)], 100)


def test_without_a_price_there_is_no_money_and_without_time_no_scale() -> None:
    found = costs(read_table(TINY), 1e9)
    assert "| cost" not in render(found)
    assert "GPU-hours." in render(found)
    assert "Cheapest: 1 node, 4 GPUs, global batch 2464: " in render(found)
    unsaid = Price(2.5)
    assert "currency not given" in render(costs(read_table(TINY), 1e9, unsaid), price=unsaid)
    assert "within 1 hour:" in render(found, 1)
    assert "No measured scale meets 0.5 hours; the fastest, 512 GPUs, takes 0.9962 hours." in render(found, 0.5)


def test_hours_and_money_have_the_uncertainty_of_the_rate() -> None:
    """1e6 samples at 40 a second are 6.944 hours on 4 GPUs; ± 5 %."""
    row = Row(1, 4, 10.0, 40.0, samples_per_s_per_gpu_2sigma=0.5, uncertainty_from="95 % of it", state="completed")
    text = render(costs([row], 1e6, Price(3.0, "EUR")), price=Price(3.0, "EUR"))
    assert "|     1 |    4 |     40.00 | 6.944 ± 0.35 | 27.78 ± 1.4 | 83.33 ± 4.2 |" in text
    assert "6.944 ± 0.35 hours, 27.78 ± 1.4 GPU-hours, 83.33 ± 4.2 EUR (±: 95 % of it)." in text
    assert "± 350 hours" in render(costs([row], 1e9))


def test_what_the_hours_leave_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "a.log", running_log([1.0] * 100))  # 64 samples/s: 4.340 hours
    failed = record(tmp_path / "run", [], state="out_of_memory", num_nodes=2, world_size=8)
    command(monkeypatch, cost.main, log, failed, "--nodes", 1, "--gpus", 4, "--model", "micro", "--samples", "1e6")
    printed = capsys.readouterr().out
    assert "|     1 |    4 |     64.00 | 4.340" in printed
    assert "DeepSpeed's timer leaves out waiting for data, which comes on top: 1 node, 4 GPUs" in printed
    assert "Without a rate: 2 nodes, 8 GPUs (out_of_memory)." in printed


def test_the_command_prints_the_verdict_and_refuses_impossible_sample_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    price = ["--price_per_gpu_hour", "2.5", "--currency", "EUR", "--price_source", "a list price"]
    command(monkeypatch, cost.main, TINY, "--samples", "1e9", *price, "--deadline_hours", "5")
    printed = capsys.readouterr().out  # 1e9 / 75008 / 3600 hours on 128 GPUs
    verdict = (
        "Cheapest within 5 hours: 32 nodes, 128 GPUs, global batch 78848: 3.703 hours, 474.0 GPU-hours, 1185.06 EUR."
    )
    assert verdict in printed
    assert printed.startswith("At 2.5 EUR for a GPU-hour; source: a list price.")
    assert "| cost EUR |" in printed
    assert "|    16 |   64 |     38512 |  7.213 |     461.6 |  1154.04 |      no |" in printed
    for samples in ("0", "nan", "inf", "many"):
        with pytest.raises(SystemExit, match="2"):
            command(monkeypatch, cost.main, TINY, f"--samples={samples}")
        assert "--samples" in capsys.readouterr().err
