"""Extrapolate the scaling of runs and tables to more GPUs, with a 95% band.

Examples:
    clap-ds extrapolate runs/sweeps/htsat_tiny-… --output projection.png

The projection is the median of draws from several laws of growth (`weak_scaling.py`), the band
their 2.5 and 97.5% quantiles.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.runs import input_parser
from clap_ds.analysis.table import markdown_table
from clap_ds.analysis.weak_scaling import DEFAULT_FIT, LAWS, Series, list_doubts, make_series
from clap_ds.utils.errors import UserError, printable, run_alone

ABOUT_BAND = (
    "Rows without a measurement are extrapolated. The projection is the median of draws whose "
    "quantiles are the band. They cover noise, fitted parameters, all laws weighted by their fit, "
    "and changes of growth beyond the measured scales. On simulated sweeps with 29 kinds of "
    "growth the band covered 98% on average and 90% for the worst kind. It does not cover growth "
    "that stops or jumps beyond the measured scales, nor growth faster than about n^1.3."
)


def render(series: Series, doubts: Sequence[str] = ()) -> str:
    """Render a series. `doubts`: those of `list_doubts`."""
    summary = f"**{summarize(series)}.**"
    if doubts:
        summary += f" Includes: {', '.join(doubts)}."
    blocks = [f"## Projection of {series.title}", summary]
    blocks += [*_render_scales(series), *_render_hold_outs(series)]
    return "\n\n".join(blocks) + "\n"


def summarize(series: Series) -> str:
    """Return the efficiency at the largest projected scale, with its band."""
    nodes = series.node_counts[-1]
    (percent,) = series.percents([nodes])
    gpus = nodes * series.gpus_per_node
    efficiency = f"{percent:.1f}% efficiency on {gpus} GPUs{series.relative}"
    band = _format_band(series, nodes)
    if not band:
        return f"{efficiency} by {DEFAULT_FIT}, without a band, which needs three scales"
    return f"{efficiency} (95% band {band})"


def _format_band(series: Series, nodes: int) -> str:
    bands = series.bands([nodes])
    if not bands:
        return ""
    low, high = bands[nodes]
    return f"{low:.1f}–{high:.1f}"


def _render_scales(series: Series) -> Iterator[str]:
    """Yield a table of all scales, measured and projected, and what the band means, if there is
    one."""
    # Samples/s/GPU by nodes.
    measured = dict(series.rates)
    rows = []
    for nodes, percent in zip(series.node_counts, series.percents(series.node_counts), strict=True):
        rate = measured.get(nodes)
        rows.append(
            [
                str(nodes),
                str(nodes * series.gpus_per_node),
                f"{rate:.1f}" if rate else "",
                f"{series.efficiency_percent(rate):.1f}" if rate else "",
                f"{percent:.1f}",
                _format_band(series, nodes),
            ]
        )
    header = ["nodes", "GPUs", "samples/s/GPU", "measured %", "projected %", "95% band"]
    yield "### Scaling"
    yield markdown_table(header, rows)
    if series.bands([1]):
        yield ABOUT_BAND


def _render_hold_outs(series: Series) -> Iterator[str]:
    """Yield a table of scales as the projection and each law alone predict them from smaller
    ones."""
    rows = []
    all_errors = []
    # Whether each band covers the measurement; series of two scales have none.
    is_covered = []
    for smaller, nodes, measured in series.hold_outs():
        for low, high in smaller.bands([nodes]).values():
            is_covered.append(low <= measured <= high)
        predictions = smaller.percents([nodes])
        predictions += [smaller.percent_by(law, nodes) for law in LAWS]
        # Points of efficiency.
        errors = [percent - measured for percent in predictions]
        all_errors.append(errors)
        largest = smaller.rates[-1][0]
        cells = [str(largest), str(nodes), f"{measured:.1f}", _format_band(smaller, nodes)]
        rows.append(cells + [f"{error:+.2f}" for error in errors])
    if not rows:
        yield "No hold-outs: they need three scales."
        return
    names = ["projection", *LAWS]
    header = ["fitted up to", "nodes", "measured %", "95% band"]
    header += [f"{name}, error pp" for name in names]
    # One mean for each column of errors.
    means = np.abs(all_errors).mean(axis=0)
    errors_text = ", ".join(f"{name} {mean:.2f}" for name, mean in zip(names, means, strict=True))
    text = f"Mean absolute error in points: {errors_text}."
    if is_covered:
        text += f" The band covered {sum(is_covered)} of {len(is_covered)}."
    yield (
        "### Hold-outs: each scale predicted from all smaller ones,"
        " and from all but the next smaller one"
    )
    yield markdown_table(header, rows)
    yield text


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also draw this picture, as .pdf and .svg, too"
    )
    options = parser.parse_args(argv)
    curves = plot_scaling.read_curves(options).values()
    # Folders may also contain strong scaling and single scales.
    sweeps = []
    for rows in curves:
        if rows[0].scaling != "strong" and len({row.nodes for row in rows}) > 1:
            sweeps.append(rows)
    projected = []
    texts = []
    problems = []
    for rows in sweeps or curves:
        try:
            series = make_series(rows)
        except UserError as error:
            problems.append(str(error))
        else:
            projected.append(series)
            texts.append(render(series, list_doubts(rows)))
    # A single refused series is an error, one of several a warning.
    if not projected:
        raise UserError("\n".join(problems))
    for problem in problems:
        print(f"warning: {printable(problem)}; skipping it", file=sys.stderr)
    print("\n".join(texts), end="")
    if options.output:
        plot_scaling.draw_projection(projected).save(options.output, ".pdf", ".svg")


if __name__ == "__main__":
    run_alone(main)
