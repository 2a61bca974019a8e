"""Scaling tables → how training would scale to more GPUs, and how sure that is.

    python analysis/project.py TABLE.csv… [--project_gpus 4096] [--output projection.png|svg|pdf]

A few laws are fitted to each table's series (`clap_ds.analysis.step_model`), and the one that foretells the measured scales
best from smaller ones is projected, with a 95 % band over all of them, to four times the GPUs measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import check_format
from clap_ds.analysis.published import GH200_PEAK_TFLOPS
from clap_ds.analysis.record import positive, section
from clap_ds.analysis.runs import MACHINE_OPTIONS, parse_options
from clap_ds.analysis.step_model import Machine, Method
from clap_ds.analysis.table import count_of, markdown_table
from clap_ds.analysis.weak_scaling import FURTHEST, STEP_MODEL, Series, read_series
from clap_ds.config.errors import run_alone
from clap_ds.config.settings import ClapSettings

DEFAULT_BUCKET_MB: float = ClapSettings.model_fields["gradient_bucket_mb"].default
THIS_PROJECTS = Method(
    gradient_bytes=2, loss="exact_local", bucket_bytes=1e6 * DEFAULT_BUCKET_MB, early_gather=True
)  # fmt: skip
"""This project's loss and all-reduce, bf16 throughout."""
NO_BATCH = f"No one batch_per_gpu or micro_batch is stated: weak scaling is assumed, and the {STEP_MODEL} left out."


def method_of(config: Mapping[str, Any]) -> Method:
    """How a run was trained, from its configuration; without one, as the published runs were."""
    if not config:
        return Method()
    clap = section(config, "clap")
    bf16, fp16, autocast = (bool(section(config, name).get("enabled")) for name in ("bf16", "fp16", "torch_autocast"))
    features = section(clap, "loss").get("features") or ("bf16" if bf16 or autocast else "fp32")
    return replace(
        THIS_PROJECTS,
        overlap=clap.get("gradient_sync", "overlapped") == "overlapped",
        gradient_bytes=2 if bf16 or fp16 or config.get("communication_data_type") in ("bf16", "fp16") else 4,
        feature_bytes=2 if features == "bf16" else 4,
        bucket_bytes=1e6 * (positive(clap.get("gradient_bucket_mb")) or DEFAULT_BUCKET_MB),
    )


def render(series: Series, gpus: Sequence[int] = ()) -> str:
    """The whole answer as Markdown, for these numbers of GPUs (that fill whole nodes) besides what was measured."""
    counts = series.node_counts(gpus)
    blocks = [f"## Projection of {series.title}", f"**{answer(series, counts[-1])}**", *_scaling(series, counts)]
    if not series.doubt():
        blocks += _hold_outs(series)
        if STEP_MODEL in series.laws:
            blocks += _by_step_model(series, counts[-1])
    if STEP_MODEL not in series.laws:
        blocks.append(NO_BATCH)
    return "\n\n".join(blocks) + "\n"


def headline(series: Series, nodes: int = 0) -> str:
    """Efficiency at that many nodes, or at `FURTHEST` times as many as measured, with its band; or why it isn't told."""
    if doubt := series.doubt():
        return f"nothing is projected: {doubt}"
    nodes = nodes or FURTHEST * series.rates[-1][0]
    band = _band(series.bands([nodes]), nodes)
    percent = series.efficiency_percent(series.fit(series.best_law()).rate(nodes))
    around = f" (95 % band {band})" if band else ", without a band, which needs three scales"
    return f"{percent:.1f} % efficiency on {nodes * series.workload.gpus_per_node} GPUs{around}"


def answer(series: Series, nodes: int = 0) -> str:
    """The headline, by which law it is, and how well that foretold what was measured."""
    law, errors = series.best_law(), series.foretold_points()
    text = f"{headline(series, nodes)}."
    if series.doubt() or not errors:
        return text
    others = ", ".join(f"{other} {error:.2f}" for other, error in errors.items() if other != law)
    best = f"By the law that foretold measured scales best from smaller ones, {law}"
    return f"{text} {best}: it missed by {errors[law]:.2f} points on average ({others})."


def _band(bands: Mapping[int, tuple[float, float]], nodes: int) -> str:
    return "{:.1f}–{:.1f}".format(*bands[nodes]) if bands else ""


def _scaling(series: Series, counts: Sequence[int]) -> list[str]:
    """Every scale as measured, by the best law and by the others."""
    best, measured, bands = series.best_law(), dict(series.rates), series.bands(counts)
    laws = sorted(series.laws, key=lambda law: law != best)
    models = [series.fit(law) for law in laws]
    halves = dict(zip(measured, series.errors, strict=False))
    rows = []
    for nodes in counts:
        gpus, rate, known = nodes * series.workload.gpus_per_node, measured.get(nodes), [""] * 3
        percents = [series.efficiency_percent(model.rate(nodes)) for model in models]
        if rate:
            percent, half = series.efficiency_percent(rate), rate * halves.get(nodes, 0.0)
            known = [f"{rate:.1f}" + f" ± {half:.1f}" * (half > 0), f"{percent:.1f}", f"{percents[0] - percent:+.2f}"]
        first, *others = (f"{percent:.1f}" for percent in percents)
        total = f"{models[0].rate(nodes) * gpus:.0f}"
        rows.append([str(nodes), str(gpus), *known[:2], first, known[2], _band(bands, nodes), total, *others])
    header = [
        "nodes",
        "GPUs",
        "samples/s/GPU",
        "measured %",
        f"{best} %",
        "error pp",
        "95 % band",
        f"samples/s by {best}",
    ]
    text = (
        "Where nothing is measured, it is extrapolated. The band holds noise, fitted parameters, all laws by how well they "
        "explain what was measured, and that growth changes beyond it. Of simulated sweeps of twelve kinds of growth it held "
        "93 in 100 on average, 86 of the worst kind; growth that stops or jumps beyond what is measured can't be foreseen."
    )
    return ["### Scaling", markdown_table([*header, *(f"{law} %" for law in laws[1:])], rows), text]


def _hold_outs(series: Series) -> list[str]:
    """Each scale as every law foretells it from smaller ones."""
    rows, in_band = [], []
    for small, nodes, actual in series.hold_outs():
        bands = small.bands([nodes])
        in_band += [low <= actual <= high for low, high in bands.values()]
        errors = (f"{small.efficiency_percent(small.fit(law).rate(nodes)) - actual:+.2f}" for law in series.laws)
        rows.append([str(small.rates[-1][0]), str(nodes), f"{actual:.1f}", _band(bands, nodes), *errors])
    if not rows:
        return ["No hold-out: that needs three scales."]
    header = ["fitted up to", "nodes", "measured %", "95 % band", *(f"{law}, error pp" for law in series.laws)]
    means = ", ".join(f"{law} {error:.2f}" for law, error in series.foretold_points().items())
    text = f"Mean error in points, whatever its sign: {means}."
    text += f" The band held {sum(in_band)} of {len(in_band)}." if in_band else ""
    title = "### Hold-outs: each scale from those up to the one before, and up to the one before that"
    return [title, markdown_table(header, rows), text]


def _by_step_model(series: Series, nodes: int) -> list[str]:
    """What the step model alone can tell: this project's method in place of the one fitted, and what it assumes."""
    model, baseline = series.fit(), series.rates[0][0]
    ours = replace(model, method=THIS_PROJECTS)
    told = [f"{each.efficiency_percent(nodes, baseline):.1f} % ({each.rate(nodes):.1f})" for each in (ours, model)]
    machine, method, workload = model.machine, model.method, model.workload
    hidden = "hidden under the backward pass but for the last bucket" if method.overlap else "not overlapped"
    return [
        f"By the {STEP_MODEL}, with this project's loss and all-reduce in place of those fitted: efficiency on "
        f"{nodes * workload.gpus_per_node} GPUs of {told[0]} in place of {told[1]} (samples/s/GPU), each over its own on "
        f"{count_of(baseline, 'node')}.",
        f"Assumed by the {STEP_MODEL}: {workload.gpus_per_node} GPUs a node, "
        f"{machine.node_bytes_per_s / 1e9:g} GB/s into a node, "
        f"{machine.gpu_bytes_per_s / 1e9:g} GB/s between its GPUs, {1e6 * machine.latency_s:g} µs a hop; "
        f"{workload.num_parameters / 1e6:.1f} M gradients of {method.gradient_bytes} bytes, {hidden}; features of "
        f"{workload.joint_dim} × {method.feature_bytes} bytes, loss {method.loss}. What grows "
        f"beyond that is counted as waiting for the slowest: {1000 * model.compute_s:.1f} ms of compute and delays of scale "
        f"{1000 * model.delay_s:.2f} ms, which grow as √n, are fitted.",
    ]


def machine_of(options: argparse.Namespace) -> Machine:
    """What a projection assumes of links and GPUs, from `MACHINE_OPTIONS`."""
    return Machine(
        1e9 * options.node_gbytes_per_s, 1e9 * options.gpu_gbytes_per_s, 1e-6 * options.latency_us,
        1e12 * (options.peak_tflops or GH200_PEAK_TFLOPS), 1e12 * options.memory_tbytes_per_s,
    )  # fmt: skip


def main() -> None:
    names = ("tables", "--series", "--project_gpus", "--output", "--markdown", "--num_parameters", "--joint_dim",
             *MACHINE_OPTIONS, "--gradient_bytes", "--no_overlap", "--loss")  # fmt: skip
    options = parse_options("Project the scaling of tables to more GPUs.", *names)
    if options.output:
        check_format(options.output)
    method = Method(not options.no_overlap, options.gradient_bytes, 2, options.loss)
    sizes = options.num_parameters or 0, options.joint_dim or 0
    found = [read_series(path, machine_of(options), method, *sizes, name=options.series) for path in options.tables]
    text = "\n".join(render(series, options.project_gpus) for series in found)
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.output:
        title = "\n".join(f"{series.name}: {headline(series)}" for series in found)
        plot_scaling.draw_projection(found, title, options.project_gpus).save(options.output)


def command() -> None:
    """Console command `clap-project`."""
    run_alone(main)


if __name__ == "__main__":
    command()
