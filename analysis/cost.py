"""What a number of samples takes and costs at each measured scale: arithmetic on the scaling table. No price is assumed."""

from __future__ import annotations

from collections.abc import Sequence

from clap_ds.analysis.table import Row, markdown_table, significant

NOT_IN_IT = (
    "Not in it: queueing, start-up, evaluation, checkpoints, and waiting for data where a rate is of DeepSpeed's timer."
)


def cost_table(rows: Sequence[Row], samples: float, price_per_gpu_hour: float | None = None) -> str:
    """Time, GPU-hours and, where there is a price, money in its currency of `samples`, each pass over them counted, at the
    scales of one series that have a rate; ± is that of the rate."""
    header = ["nodes", rows[0].unit, "samples/s", "hours", "GPU-hours", *(["cost"] if price_per_gpu_hour else [])]
    body = []
    for row in rows:
        if row.rate and row.samples_per_s:
            hours = samples / row.samples_per_s / 3600
            figures = [
                hours,
                hours * row.gpus,
                *([hours * row.gpus * price_per_gpu_hour] if price_per_gpu_hour else []),
            ]
            half = row.samples_per_s_per_gpu_2sigma
            around = [f" ± {float(f'{value * half / row.rate:.2g}'):g}" if half else "" for value in figures]
            cells = [significant(value) + error for value, error in zip(figures, around, strict=True)]
            body.append([*row.cells("nodes", "gpus", "samples_per_s"), *cells])
    return markdown_table(header, body)
