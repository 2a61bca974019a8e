"""Scaling tables → how training would scale to more GPUs, how sure that is, and what would change it.

    python analysis/project.py TABLE.csv [OTHER.csv…] [--fit_nodes 16] [--output projection.png|svg|html]

Fits `clap_ds.analysis.step_model` to the first table; says how well it fits, how well a fit on the small scales foretells the
large ones, and how well its delays, unchanged, describe the other tables. Then projects, with 95 % bands, and asks what if.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis.figure import check_format
from clap_ds.analysis.projection import (
    Measured,
    Setting,
    at_rate,
    engine_methods,
    errors_points,
    fit_measured,
    log_linear_efficiency,
    node_counts_of,
    prediction_bands,
    read_measured,
    transfer,
    what_ifs,
)
from clap_ds.analysis.published import GH200_PEAK_TFLOPS
from clap_ds.analysis.runs import run_command
from clap_ds.analysis.step_model import TERMS, Machine, Method, StepModel
from clap_ds.analysis.table import markdown_table, write_text
from clap_ds.analysis.throughput import positive_float, positive_int

PROJECTED_GPUS = (256, 512, 1024, 2048, 4096)
OTHER_TAILS = (1.6, 3.0)
FIT_NODES = 16
FASTER = 5.0
BASELINE_NOTE = "Efficiency over the same configuration's smallest scale, in percent (samples/s/GPU)."


def render(
    measured: Measured,
    others: Sequence[Measured],
    setting: Setting,
    fit_nodes: int = FIT_NODES,
    gpus: Sequence[int] = PROJECTED_GPUS,
    faster_rate: float | None = None,
) -> str:
    """The whole answer as Markdown; `faster_rate` (default: five times the measured one) is that of the faster step."""
    model = fit_measured(measured, setting)
    errors = errors_points(model, measured)
    lines = [f"## Projection of {measured.title}", "", _assumptions(model), "", "### Fit", ""]
    rows = [
        [str(nodes), f"{measured.efficiency_percent(rate):.1f}", f"{measured.efficiency_percent(model.rate(nodes)):.1f}",
         f"{error:+.2f}"] + [f"{1000 * model.terms_s(nodes)[term]:.1f}" for term in TERMS]
        for (nodes, rate), error in zip(measured.rates, errors, strict=True)
    ]  # fmt: skip
    header = ["nodes", "measured %", "model %", "error pp", *(f"{term} ms" for term in TERMS)]
    lines += [markdown_table(header, rows), ""]
    lines += [
        f"Fitted: {1000 * model.compute_s:.1f} ms of compute, delays of scale {1000 * model.delay_s:.2f} ms. "
        f"Largest error {max(map(abs, errors)):.2f} percentage points of efficiency.", "",
    ]  # fmt: skip
    lines += _hold_out(measured, setting, fit_nodes)
    for other in others:
        lines += _transferred(model, other, setting, fit_nodes)
    lines += _projected(measured, setting, model, gpus, faster_rate or FASTER * measured.rates[0][1])
    return "\n".join(lines) + "\n"


def _assumptions(model: StepModel) -> str:
    machine, method, workload = model.machine, model.method, model.workload
    hidden = "hidden under the backward pass but for the last bucket" if method.overlap else "not overlapped"
    return (
        f"Assumed: {workload.gpus_per_node} GPUs a node, {machine.node_bytes_per_s / 1e9:g} GB/s into a node, "
        f"{machine.gpu_bytes_per_s / 1e9:g} GB/s between its GPUs, {1e6 * machine.latency_s:g} µs a hop; "
        f"{workload.num_parameters / 1e6:.1f} M gradients of {method.gradient_bytes} bytes, {hidden}; features of "
        f"{workload.joint_dim} × {method.feature_bytes} bytes, loss {method.loss}; the slowest rank's delay with a "
        f"power-law tail of index {model.tail_index:g}."
    )


def _hold_out(measured: Measured, setting: Setting, fit_nodes: int) -> list[str]:
    small = measured.up_to(fit_nodes)
    larger = [point for point in measured.rates if point[0] > fit_nodes]
    if not larger or len(small.rates) < 2:
        return [f"No hold-out: the table needs two scales up to {fit_nodes} nodes and one above.", ""]
    model = fit_measured(small, setting)
    bands = prediction_bands(small, setting, [nodes for nodes, _ in larger])
    rows = []
    for nodes, rate in larger:
        actual, foretold = measured.efficiency_percent(rate), measured.efficiency_percent(model.rate(nodes))
        band = f"{bands[nodes][0]:.1f}–{bands[nodes][1]:.1f}" if bands else ""
        cells = [str(nodes), f"{actual:.1f}", f"{foretold:.1f}", band, f"{foretold - actual:+.2f}"]
        rival = log_linear_efficiency(small, nodes) - actual if len(small.rates) >= 3 else None
        rows.append([*cells, f"{rival:+.2f}" if rival is not None else ""])
    header = ("nodes", "measured %", "foretold %", "95 % band", "error pp", "log + linear pp")
    return [f"### Fitted on up to {fit_nodes} nodes, tried on the rest", "", markdown_table(header, rows), ""]


def _transferred(model: StepModel, other: Measured, setting: Setting, fit_nodes: int) -> list[str]:
    moved = errors_points(transfer(model, other, setting), other)
    own = errors_points(fit_measured(other, setting), other)
    rows = [
        [str(nodes), f"{other.efficiency_percent(rate):.1f}", f"{first:+.2f}", f"{second:+.2f}"]
        for (nodes, rate), first, second in zip(other.rates, moved, own, strict=True)
    ]
    header = ("nodes", "measured %", "delays unchanged, error pp", "fitted to it, error pp")
    text = (
        f"Largest error {max(map(abs, moved)):.2f} points with the delays of the first table and nothing fitted but its "
        f"own smallest scale; {max(map(abs, own)):.2f} with both parameters fitted."
    )
    lines = [f"### Same model on {other.title}", "", markdown_table(header, rows), "", text, ""]
    return lines + [line.replace("### ", "#### ") for line in _hold_out(other, setting, fit_nodes)]


def _projected(
    measured: Measured, setting: Setting, model: StepModel, gpus: Sequence[int], faster_rate: float
) -> list[str]:
    counts = node_counts_of(measured, gpus)
    baseline = measured.rates[0][0]
    bands = prediction_bands(measured, setting, counts)
    tails = [fit_measured(measured, setting, tail) for tail in OTHER_TAILS]
    rows = []
    for nodes in counts:
        total = model.rate(nodes) * nodes * measured.workload.gpus_per_node
        band = f"{bands[nodes][0]:.1f}–{bands[nodes][1]:.1f}" if bands else ""
        cells = [f"{measured.efficiency_percent(item.rate(nodes)):.1f}" for item in (model, *tails)]
        rows.append(
            [str(nodes), str(nodes * measured.workload.gpus_per_node), cells[0], band, f"{total:.0f}", *cells[1:]]
        )
    header = [
        "nodes",
        "GPUs",
        "efficiency %",
        "95 % band",
        "samples/s",
        *(f"% if tail index {t:g}" for t in OTHER_TAILS),
    ]
    lines = ["### Projection", "", markdown_table(header, rows), ""]
    lines += ["The band holds noise, fitted parameters and the tail index, with the terms as assumed; the last columns "
              "show what the tail index alone is worth.", ""]  # fmt: skip
    changed = [
        [name, f"{changed.rate(baseline):.1f}"]
        + [f"{changed.efficiency_percent(nodes, baseline):.1f} ({changed.rate(nodes):.1f})" for nodes in counts]
        for name, changed in what_ifs(model).items()
    ]
    header = ["what if", f"samples/s/GPU, {baseline} node{'s' if baseline > 1 else ''}"]
    header += [f"{nodes * measured.workload.gpus_per_node} GPUs" for nodes in counts]
    lines += ["### What if", "", markdown_table(header, changed), "", BASELINE_NOTE, ""]
    return lines + _with_engine(measured, model, counts, faster_rate)


def _with_engine(measured: Measured, model: StepModel, counts: Sequence[int], faster_rate: float) -> list[str]:
    """This project's loss and all-reduce, each with and without, at the measured step and a faster one."""
    baseline = measured.rates[0][0]
    methods = engine_methods()
    both = replace(model, method=methods["both"])
    steps = {"as measured": model}
    for shrink in (False, True):
        name = f"{faster_rate:.0f} samples/s/GPU, delays {'in proportion' if shrink else 'unchanged'}"
        steps[name] = at_rate(both, faster_rate, baseline, shrink)
    rows = []
    for step, found in steps.items():
        for name, method in methods.items():
            changed = replace(found, method=method)
            cells = [f"{changed.efficiency_percent(n, baseline):.1f} ({changed.rate(n):.1f})" for n in counts]
            rows.append([step, name, f"{changed.rate(baseline):.1f}", *cells])
    header = ["step", "with", f"samples/s/GPU, {baseline} node{'s' if baseline > 1 else ''}"]
    header += [f"{nodes * measured.workload.gpus_per_node} GPUs" for nodes in counts]
    text = (
        "Gradients and features in bf16. Exact local loss: features gathered once, the audio tower's under the text tower's "
        "forward pass, and 2 floats a sample; no feature gradient travels. Without it, as many bytes again. Overlapped "
        f"all-reduce: buckets of {both.method.bucket_bytes / 1e6:g} MB under the backward pass. {BASELINE_NOTE}"
    )
    return ["### This project's loss and all-reduce", "", markdown_table(header, rows), "", text]


def main() -> None:
    parser = argparse.ArgumentParser(description="Project a scaling table to more GPUs.")
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE", help="the first is fitted, the others tried")
    parser.add_argument(
        "--fit_nodes", type=positive_int, default=FIT_NODES, help="hold-out: largest scale fitted (default 16)"
    )
    parser.add_argument("--project_gpus", type=positive_int, nargs="+", default=list(PROJECTED_GPUS), metavar="GPUS")
    parser.add_argument("--output", type=Path, help="figure (.png, .svg or .html)")
    parser.add_argument("--markdown", type=Path, help="write what is printed here")
    parser.add_argument("--faster_rate", type=positive_float, help="samples/s/GPU of a faster step (default: 5 times)")
    parser.add_argument("--num_parameters", type=positive_float, help="trained parameters, for models not published")
    parser.add_argument("--joint_dim", type=positive_int, help="width of the joint embedding, for models not published")
    add_machine_options(parser)
    parser.add_argument("--gradient_bytes", type=int, choices=(2, 4), default=4, help="per gradient on the network")
    parser.add_argument("--no_overlap", action="store_true", help="the all-reduce was not overlapped with backward")
    parser.add_argument("--loss", choices=("gather_with_grad", "exact_local"), default="gather_with_grad")
    options = parser.parse_args()
    if options.output:
        check_format(options.output)
    method = Method(not options.no_overlap, options.gradient_bytes, 2, options.loss)
    setting = Setting(machine_of(options), method)
    found = [read_measured(path, options.num_parameters, options.joint_dim) for path in options.tables]
    text = render(found[0], found[1:], setting, options.fit_nodes, options.project_gpus, options.faster_rate)
    print(text, end="")
    if options.markdown:
        write_text(options.markdown, text)
    if options.output:
        from clap_ds.analysis.plot_projection import save_projection

        save_projection(options.output, found, setting, options.fit_nodes, max(options.project_gpus))


def add_machine_options(parser: argparse.ArgumentParser, peak: bool = True) -> None:
    """Options of `Machine`, a Jupiter node unless said otherwise; without `peak`, `--peak_tflops` is there already."""
    parser.add_argument("--node_gbytes_per_s", type=positive_float, default=80, help="into one node (default 80)")
    parser.add_argument("--gpu_gbytes_per_s", type=positive_float, default=150, help="between a node's GPUs")
    parser.add_argument("--latency_us", type=positive_float, default=10, help="of a hop between nodes")
    if peak:
        parser.add_argument("--peak_tflops", type=positive_float, help="dense peak of one GPU (default 989)")
    parser.add_argument("--memory_tbytes_per_s", type=positive_float, default=4, help="of one GPU's memory")


def machine_of(options: argparse.Namespace) -> Machine:
    return Machine(
        1e9 * options.node_gbytes_per_s, 1e9 * options.gpu_gbytes_per_s, 1e-6 * options.latency_us,
        1e12 * (options.peak_tflops or GH200_PEAK_TFLOPS), 1e12 * options.memory_tbytes_per_s,
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
