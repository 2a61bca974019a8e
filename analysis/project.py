"""Scaling tables → how training would scale to more GPUs, how sure that is, and what would change it.

    python analysis/project.py TABLE.csv [OTHER.csv…] [--fit_nodes 16] [--output projection.png|svg|html]

Fits `clap_ds.analysis.step_model` to the first table; says how well it fits, how well fits on small scales predict larger
ones, and how well its delays, unchanged, describe the other tables. Then projects, with 95 % bands, and asks what if.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from clap_ds.analysis import plot_scaling
from clap_ds.analysis.figure import check_format
from clap_ds.analysis.growth import SIMPLE_FITS
from clap_ds.analysis.published import GH200_PEAK_TFLOPS
from clap_ds.analysis.runs import FIT_NODES, MACHINE_OPTIONS, PROJECTED_GPUS, parse_options
from clap_ds.analysis.step_model import BACKWARD_SHARE, TERMS, Machine, Method, Series, StepModel, read_series, transfer
from clap_ds.analysis.table import count_of, markdown_table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.settings import ClapSettings

OTHER_SHAPES = {"log n": 0.0, "√n": 0.5, "n": 1.0}
FASTER = 5.0
BASELINE_NOTE = "Efficiency over the same configuration's smallest scale, in percent (samples/s/GPU)."
DEFAULT_BUCKET_MB: float = ClapSettings.model_fields["gradient_bucket_mb"].default


def what_ifs(model: StepModel) -> dict[str, StepModel]:
    """The model with one thing changed at a time."""
    machine, method = model.machine, model.method
    slow = replace(machine, node_bytes_per_s=machine.node_bytes_per_s / 4)
    overlapped = "without overlap of the all-reduce" if method.overlap else "with overlap of the all-reduce"
    return {
        "as fitted": model,
        overlapped: replace(model, method=replace(method, overlap=not method.overlap)),
        "exact local loss": replace(model, method=replace(method, loss="exact_local", early_gather=True)),
        "bf16 all-reduce": replace(model, method=replace(method, gradient_bytes=2)),
        "compute twice as fast": replace(model, compute_s=model.compute_s / 2, window_s=model.window_s / 2),
        "links a quarter as fast": replace(model, machine=slow),
        "a quarter of the delays": replace(model, delay_s=model.delay_s / 4),
    }


def engine_methods() -> dict[str, Method]:
    """This project's loss and all-reduce, each with and without, bf16 on the wire throughout."""
    neither = Method(overlap=False, gradient_bytes=2, feature_bytes=2, bucket_bytes=1e6 * DEFAULT_BUCKET_MB)
    exact = replace(neither, loss="exact_local", early_gather=True)
    overlapped, both = (replace(method, overlap=True) for method in (neither, exact))
    return {"neither": neither, "exact local loss": exact, "overlapped all-reduce": overlapped, "both": both}


def method_of(config: Mapping[str, Any]) -> Method:
    """How a run was trained, from its configuration; without one, as the published runs were."""
    if not config:
        return Method()
    clap = config.get("clap", {})
    bf16, fp16, autocast = (bool(config.get(name, {}).get("enabled")) for name in ("bf16", "fp16", "torch_autocast"))
    features = clap.get("loss", {}).get("features") or ("bf16" if bf16 or autocast else "fp32")
    return replace(
        engine_methods()["both"],
        overlap=clap.get("gradient_sync", "overlapped") == "overlapped",
        gradient_bytes=2 if bf16 or fp16 or config.get("communication_data_type") in ("bf16", "fp16") else 4,
        feature_bytes=2 if features == "bf16" else 4,
        bucket_bytes=1e6 * clap.get("gradient_bucket_mb", DEFAULT_BUCKET_MB),
    )


def at_rate(model: StepModel, rate: float, nodes: int, delays_shrink: bool) -> StepModel:
    """The model with compute so short that it reaches `rate` samples/s/GPU on `nodes` nodes, or UserError if that's too fast.

    Delays shorten with the step (work that varies) or stay (what the machine does).
    """
    step_s = model.workload.batch_per_gpu / rate
    delay_s = model.delay_s * step_s / model.step_s(nodes) if delays_shrink else model.delay_s
    faster = replace(model, window_s=BACKWARD_SHARE * step_s, delay_s=delay_s).with_step(step_s, nodes)
    if faster.compute_s <= 0:
        raise UserError(
            f"{rate:g} samples/s/GPU on {count_of(nodes, 'node')}: communication and delays alone take longer"
        )
    return faster


def render(
    series: Series, others: Sequence[Series] = (), fit_nodes: int = FIT_NODES, gpus: Sequence[int] = PROJECTED_GPUS,
    faster_rate: float | None = None,
) -> str:  # fmt: skip
    """The whole answer as Markdown: `series` is fitted and projected, its delays are tried on `others`.

    The hold-out is fitted on up to `fit_nodes`; `gpus` that fill no whole number of nodes are left out; the faster step's
    `faster_rate`, in samples/s/GPU, is five times the measured one unless given.
    """
    model = series.fit()
    errors = series.errors_points(model)
    rows = [
        [str(nodes), f"{series.efficiency_percent(rate):.1f}", f"{series.efficiency_percent(model.rate(nodes)):.1f}",
         f"{error:+.2f}", *(f"{1000 * model.terms_s(nodes)[term]:.1f}" for term in TERMS)]
        for (nodes, rate), error in zip(series.rates, errors, strict=True)
    ]  # fmt: skip
    header = ["nodes", "measured %", "model %", "error pp", *(f"{term} ms" for term in TERMS)]
    per_node = series.workload.gpus_per_node
    counts = [count // per_node for count in gpus if count >= per_node and count % per_node == 0]
    if not counts:
        raise UserError(f"--project_gpus {' '.join(map(str, gpus))}: none fills whole nodes of {per_node} GPUs")
    blocks = [
        f"## Projection of {series.title}", _assumptions(model), "### Fit", markdown_table(header, rows),
        f"Fitted: {1000 * model.compute_s:.1f} ms of compute, delays of scale {1000 * model.delay_s:.2f} ms and shape "
        f"{model.shape:.2f} (0: they grow as log n; 0.5: as √n; 1: as n). Largest error {max(map(abs, errors)):.2f} percentage "
        "points of efficiency.",
        *_disagreement(series, model), *_hold_outs(series, fit_nodes),
        *(block for other in others for block in _transferred(model, other, fit_nodes)),
        *_projected(series, model, counts), *_what_if(model, counts, series.rates[0][0]),
        *_with_engine(model, counts, series.rates[0][0], faster_rate or FASTER * series.rates[0][1]),
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def _assumptions(model: StepModel) -> str:
    machine, method, workload = model.machine, model.method, model.workload
    hidden = "hidden under the backward pass but for the last bucket" if method.overlap else "not overlapped"
    return (
        f"Assumed: {workload.gpus_per_node} GPUs a node, {machine.node_bytes_per_s / 1e9:g} GB/s into a node, "
        f"{machine.gpu_bytes_per_s / 1e9:g} GB/s between its GPUs, {1e6 * machine.latency_s:g} µs a hop; "
        f"{workload.num_parameters / 1e6:.1f} M gradients of {method.gradient_bytes} bytes, {hidden}; features of "
        f"{workload.joint_dim} × {method.feature_bytes} bytes, loss {method.loss}. What grows "
        "beyond that is counted as waiting for the slowest."
    )


def _disagreement(series: Series, model: StepModel) -> list[str]:
    """What to make of it where the measured breakdown names another cause than the fit, by a tenth of the growth or more."""
    if len(series.exposed) < 2:
        return []
    (first, small), (last, large) = series.exposed[0], series.exposed[-1]
    fitted = model.terms_s(last)["gradient all-reduce"] - model.terms_s(first)["gradient all-reduce"]
    measured, grown = large - small, model.step_s(last) - model.step_s(first)
    if abs(measured - fitted) <= max(0.1 * abs(grown), 1e-4):
        return []
    return [
        f"**Breakdown and fit disagree about the cause.** From {count_of(first, 'node')} to {count_of(last, 'node')} exposed "
        f"communication grew by {1000 * measured:+.1f} ms a step in the breakdown, "
        f"the fit's gradient all-reduce by {1000 * fitted:+.1f} ms; the fit "
        "counts the rest as compute or waiting (a rank waits for the slowest in the all-reduce, too). Don't rely on what-ifs "
        "of links, overlap and bytes here: try `--no_overlap` and the links' measured `--node_gbytes_per_s` first."
    ]


def _hold_outs(series: Series, fit_nodes: int) -> list[str]:
    """Each scale as predicted from all smaller ones, and from those up to `fit_nodes`, beside simple fits of the same rates."""
    scales = [nodes for nodes, _ in series.rates]
    cases = list(pairwise(scales[1:]))
    cases += [(fit_nodes, nodes) for nodes in scales if nodes > fit_nodes and series.has_hold_out(fit_nodes)]
    rows, errors, in_band = [], {}, []
    for largest, nodes in dict.fromkeys((max(n for n in scales if n <= most), nodes) for most, nodes in cases):
        small, actual = series.up_to(largest), series.efficiency_percent(dict(series.rates)[nodes])
        predicted, bands = series.efficiency_percent(small.fit().rate(nodes)), small.bands([nodes])
        tried = {"model": predicted, **{name: small.simple_efficiency(name, nodes) for name in SIMPLE_FITS}}
        found = {name: None if value is None else value - actual for name, value in tried.items()}
        errors[largest, nodes] = found
        in_band += [low <= actual <= high for low, high in bands.values()]
        rows.append([
            str(largest), str(nodes), f"{actual:.1f}", f"{predicted:.1f}", _band(bands, nodes),
            *("" if error is None else f"{error:+.2f}" for error in found.values()),
        ])  # fmt: skip
    if not rows:
        return ["No hold-out: that needs three scales."]
    header = [
        "fitted up to",
        "nodes",
        "measured %",
        "predicted %",
        "95 % band",
        *(f"{name}, error pp" for name in tried),
    ]
    comparable = [found for found in errors.values() if None not in found.values()]
    means = [
        f"{name} {sum(abs(found[name] or 0) for found in comparable) / len(comparable):.2f} "
        f"({sum(found[name] or 0 for found in comparable) / len(comparable):+.2f})" for name in tried if comparable
    ]  # fmt: skip
    text = f"The band held {sum(in_band)} of {len(in_band)}." if in_band else ""
    if means:
        text += f" Mean absolute (and signed) error in points, where all of them can be fitted: {', '.join(means)}."
    title = f"### Hold-outs: each scale from all smaller ones, and from up to {count_of(fit_nodes, 'node')}"
    return [title, markdown_table(header, rows), text]


def _band(bands: dict[int, tuple[float, float]], nodes: int) -> str:
    return "{:.1f}–{:.1f}".format(*bands[nodes]) if bands else ""


def _transferred(model: StepModel, other: Series, fit_nodes: int) -> list[str]:
    moved, own = other.errors_points(transfer(model, other)), other.errors_points(other.fit())
    rows = [
        [str(nodes), f"{other.efficiency_percent(rate):.1f}", f"{first:+.2f}", f"{second:+.2f}"]
        for (nodes, rate), first, second in zip(other.rates, moved, own, strict=True)
    ]
    header = ("nodes", "measured %", "delays unchanged, error pp", "fitted to it, error pp")
    text = (
        f"Largest error {max(map(abs, moved)):.2f} points with the delays of the first table and nothing fitted but its "
        f"own smallest scale; {max(map(abs, own)):.2f} with both parameters fitted."
    )
    held_out = [block.replace("### ", "#### ") for block in _hold_outs(other, fit_nodes)]
    return [f"### Same model on {other.title}", markdown_table(header, rows), text, *held_out]


def _projected(series: Series, model: StepModel, counts: Sequence[int]) -> list[str]:
    bands, measured = series.bands(counts), dict(series.rates)
    models = [model, *(series.fit(shape) for shape in OTHER_SHAPES.values())]
    rows = []
    for nodes in counts:
        gpus = nodes * series.workload.gpus_per_node
        percents = [f"{series.efficiency_percent(item.rate(nodes)):.1f}" for item in models]
        total = f"{model.rate(nodes) * gpus:.0f}"
        known = f"{series.efficiency_percent(measured[nodes]):.1f}" if nodes in measured else ""
        rows.append([str(nodes), str(gpus), known, percents[0], _band(bands, nodes), total, *percents[1:]])
    others = [f"% if delays grow as {name}" for name in OTHER_SHAPES]
    header = ["nodes", "GPUs", "measured %", "projected %", "95 % band", "projected samples/s", *others]
    text = (
        "Where nothing is measured, it is extrapolated. The band holds noise, fitted parameters, how delays grow, that the "
        "stated terms may cost nothing or half as much again, and that growth changes beyond the largest scale measured. "
        "Simulated sweeps of twelve kinds of growth were held in 9 of 10 cases or more; growth that stops or jumps just beyond "
        "what is measured, in 7 to 8 of 10. The last columns show what growth alone is worth."
    )
    return ["### Projection", markdown_table(header, rows), text]


def _what_if(model: StepModel, counts: Sequence[int], baseline: int) -> list[str]:
    rows = [[name, *_rates(changed, counts, baseline)] for name, changed in what_ifs(model).items()]
    return [
        "### What if (calculated, not measured)",
        markdown_table(["what if", *_rates_header(model, counts, baseline)], rows),
        BASELINE_NOTE,
    ]


def _rates(model: StepModel, counts: Sequence[int], baseline: int) -> list[str]:
    cells = [f"{model.efficiency_percent(nodes, baseline):.1f} ({model.rate(nodes):.1f})" for nodes in counts]
    return [f"{model.rate(baseline):.1f}", *cells]


def _rates_header(model: StepModel, counts: Sequence[int], baseline: int) -> list[str]:
    gpus = [f"{nodes * model.workload.gpus_per_node} GPUs" for nodes in counts]
    return [f"samples/s/GPU, {count_of(baseline, 'node')}", *gpus]


def _with_engine(model: StepModel, counts: Sequence[int], baseline: int, faster_rate: float) -> list[str]:
    """This project's loss and all-reduce, each with and without, at the fitted step and a faster one."""
    methods = engine_methods()
    both = replace(model, method=methods["both"])
    faster = f"{faster_rate:.0f} samples/s/GPU, delays"
    steps, impossible = {"as fitted": model}, []
    for kept, shrink in (("unchanged", False), ("in proportion", True)):
        try:
            steps[f"{faster} {kept}"] = at_rate(both, faster_rate, baseline, shrink)
        except UserError as error:
            reason = str(error).partition(": ")[2]
            impossible.append([f"{faster} {kept}", f"can't be: {reason}", *[""] * (1 + len(counts))])
    rows = [
        [step, name, *_rates(replace(found, method=method), counts, baseline)]
        for step, found in steps.items()
        for name, method in methods.items()
    ]
    text = (
        "Gradients and features in bf16. Exact local loss: features gathered once, the audio tower's under the text tower's "
        "forward pass, and 2 floats a sample; no feature gradient travels. Without it, as many bytes again. Overlapped "
        f"all-reduce: buckets of {both.method.bucket_bytes / 1e6:g} MB under the backward pass. {BASELINE_NOTE}"
    )
    table = markdown_table(["step", "with", *_rates_header(model, counts, baseline)], rows + impossible)
    return ["### This project's loss and all-reduce (calculated, not measured)", table, text]


def machine_of(options: argparse.Namespace) -> Machine:
    """What a projection assumes of links and GPUs, from `MACHINE_OPTIONS`."""
    return Machine(
        1e9 * options.node_gbytes_per_s, 1e9 * options.gpu_gbytes_per_s, 1e-6 * options.latency_us,
        1e12 * (options.peak_tflops or GH200_PEAK_TFLOPS), 1e12 * options.memory_tbytes_per_s,
    )  # fmt: skip


def main() -> None:
    names = ("tables", "--series", "--fit_nodes", "--project_gpus", "--output", "--markdown", "--faster_rate",
             "--num_parameters", "--joint_dim", *MACHINE_OPTIONS, "--gradient_bytes", "--no_overlap", "--loss")  # fmt: skip
    options = parse_options("Project scaling tables to more GPUs: the first is fitted, the others tried.", *names)
    if options.output:
        check_format(options.output)
    method = Method(not options.no_overlap, options.gradient_bytes, 2, options.loss)
    sizes = options.num_parameters or 0, options.joint_dim or 0
    found = [read_series(path, machine_of(options), method, *sizes, name=options.series) for path in options.tables]
    text = render(found[0], found[1:], options.fit_nodes, options.project_gpus, options.faster_rate)
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.output:
        picture = plot_scaling.draw_projection(found, options.fit_nodes, max(options.project_gpus))
        picture.save(options.output, "Projected scaling of CLAP training")


if __name__ == "__main__":
    run_alone(main)
