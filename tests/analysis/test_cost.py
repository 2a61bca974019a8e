"""Cost by hand: 1e9 samples at the published rates."""

from pathlib import Path

import pytest

from clap_ds.analysis import cost
from clap_ds.analysis.cost import cheapest, costs, render
from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.runs import InputError
from clap_ds.analysis.table import Row, read_table

TINY = PUBLISHED_DIR / "jupiter_htsat_tiny.csv"


def test_hours_gpu_hours_and_money_of_a_published_scale() -> None:
    found = costs(read_table(TINY), 1e9, price_per_gpu_hour=2.5)[5]
    assert (found.row.nodes, found.row.gpus) == (32, 128)
    assert found.hours == pytest.approx(3.70331, abs=1e-5)  # 1e9 / 75008 / 3600
    assert found.gpu_hours == pytest.approx(474.024, abs=1e-3)
    assert found.money == pytest.approx(1185.06, abs=0.01)


@pytest.mark.parametrize(("deadline", "gpus"), [(None, 4), (200, 4), (60, 8), (5, 128), (1, 512), (0.9, None)])
def test_cheapest_scale_within_a_deadline(deadline: float | None, gpus: int | None) -> None:
    # Efficiency falls with scale, so the cheapest is the smallest that is in time.
    best = cheapest(costs(read_table(TINY), 1e9), deadline)
    assert (best.row.gpus if best else None) == gpus


def test_a_scale_that_is_larger_and_more_efficient_is_cheaper() -> None:
    rows = [Row(1, 4, 10.0, 40.0), Row(2, 8, 11.0, 88.0)]
    best = cheapest(costs(rows, 1000))
    assert best is not None
    assert best.row.gpus == 8


def test_no_scale_in_time_is_said() -> None:
    assert "No measured scale meets 0.5 hours; the fastest, 512 GPUs" in render(costs(read_table(TINY), 1e9), 0.5)


def test_rows_without_a_rate_are_passed_over_and_only_those_refused() -> None:
    assert len(costs([Row(1, 4, 10.0, 40.0), Row(2, 8)], 100)) == 1
    with pytest.raises(InputError, match="no row"):
        costs([Row(2, 8)], 100)


def test_without_a_price_there_is_no_money() -> None:
    text = render(costs(read_table(TINY), 1e9))
    assert "| cost" not in text
    assert "GPU-hours." in text


@pytest.mark.parametrize("samples", ["0", "-1", "nan", "inf", "many"])
def test_impossible_sample_counts_are_refused(
    samples: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cost.py", str(TINY), f"--samples={samples}"])
    with pytest.raises(SystemExit) as stopped:
        cost.main()
    assert stopped.value.code == 2
    assert "--samples" in capsys.readouterr().err


def test_the_command_prints_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cost.py", str(Path(TINY)), "--samples", "1e9", "--price_per_gpu_hour", "2.5", "--deadline_hours", "5"]
    monkeypatch.setattr("sys.argv", arguments)
    cost.main()
    assert (
        "Cheapest within 5 hours: 32 nodes, 128 GPUs: 3.703 hours, 474.0 GPU-hours, 1185.06." in capsys.readouterr().out
    )
