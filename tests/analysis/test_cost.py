"""Cost by hand."""

from clap_ds.analysis.cost import cost_table
from clap_ds.analysis.csv_table import read_table
from clap_ds.analysis.table import Row
from tests.analysis.samples import TINY


def test_time_gpu_hours_and_money_are_arithmetic_on_the_published_rates() -> None:
    text = cost_table(read_table(TINY), 1e9, 2.5)  # 1e9 / 75008 / 3600 hours on 128 GPUs
    rows = [line.split()[1::2] for line in text.splitlines()]
    assert rows[0][-2:] == ["GPU-hours", "cost"]
    assert rows[7] == ["32", "128", "75008", "3.703", "474.0", "1185"]
    assert "cost" not in cost_table(read_table(TINY), 1e9)


def test_they_have_the_uncertainty_of_the_rate_and_rows_without_one_are_passed_over() -> None:
    """1e6 samples at 40 a second are 6.944 hours on 4 GPUs; ± 5 %."""
    rows = [Row(1, 4, 10.0, 40.0, samples_per_s_per_gpu_2sigma=0.5), Row(2, 8, state="failed")]
    text = cost_table(rows, 1e6, 3.0)
    assert "|     1 |    4 |     40.00 | 6.944 ± 0.35 | 27.78 ± 1.4 | 83.33 ± 4.2 |" in text
    assert len(text.splitlines()) == 3
