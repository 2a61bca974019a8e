"""Predict a run's memory, throughput and GPU hours without a GPU.

Examples:
    clap-ds plan --config htsat_tiny --gpu h100-sxm --nodes 1 4 16 --gpus_per_node 4
    clap-ds plan --config my_run.json --gpu a100-sxm-80gb --find_micro_batch

docs/estimation.md describes the method and its accuracy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clap_ds.analysis.published import PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.table import markdown_table, significant
from clap_ds.analysis.weak_scaling import DEFAULT_FIT, ScalingFit, Series
from clap_ds.config.arguments import add_config, add_json, make_parser, positive, whole_number
from clap_ds.config.batch_sizes import GLOBAL_BATCH
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.flop_count.device_specs import Gpu, gpu_named
from clap_ds.inference.options import check_output
from clap_ds.planning.communication import Cluster, Traffic, communication_s
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.files import show_results

# Operation classes printed with their efficiencies.
MAX_CLASSES = 4
# A 200 Gb/s adapter per GPU, as on the cluster of the published runs.
ADAPTER_GBYTES_PER_S = 25.0
# Published series whose step-time growth with nodes is assumed.
GROWTH_SERIES = "jupiter_htsat_tiny"


def main(argv: Sequence[str] | None = None) -> None:
    """Predict and print.

    Raises UserError for a bad configuration or GPU, or a fixed global batch at several scales.
    """
    arguments = parse_arguments(argv)
    check_output(arguments.json, "--json")
    gpu = gpu_named(arguments.gpu)
    run = load_run(arguments.config, min(arguments.nodes) * arguments.gpus_per_node, arguments.set)
    if arguments.ramp:
        print(ramp_table(run, arguments.gpus_per_node))
        return
    if GLOBAL_BATCH in run.deepspeed and len(set(arguments.nodes)) > 1:
        raise UserError(
            f"{run.path}: {GLOBAL_BATCH} fits only one scale; give one value of --nodes, or remove it"
        )
    print("recording training steps, for about a minute or two", file=sys.stderr, flush=True)
    os.environ["DS_ACCELERATOR"] = "cpu"  # nothing is computed
    report = make_plan(run, gpu, arguments)
    show_results(render(report), report, arguments.json)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_config(parser)
    add = parser.add_argument
    gpu_help = "plan for this GPU, e.g. h100-sxm; an unknown name lists all"
    add("--gpu", required=True, metavar="NAME", help=gpu_help)
    nodes_help = "plan for these numbers of nodes"
    add("--nodes", type=whole_number(), nargs="+", default=[1], metavar="N", help=nodes_help)
    add("--gpus_per_node", type=whole_number(), default=4, metavar="N", help="set GPUs per node")
    add("--find_micro_batch", action="store_true", help="find the largest multiple of 8 that fits")
    ramp_help = "only print how many nodes each batch of clap.train.batch_ramp can use"
    add("--ramp", action="store_true", help=ramp_help)
    network_help = (
        "set a node's bandwidth to other nodes, one way, all adapters together"
        f" (default: {ADAPTER_GBYTES_PER_S:g} per GPU)"
    )
    add("--network_gbytes_per_s", type=positive, metavar="N", help=network_help)
    samples_help = "estimate hours for this many training samples, repeats included"
    add("--samples", type=positive, metavar="N", help=samples_help)
    add_json(parser)
    return parser.parse_args(argv)


def ramp_table(run: RunSettings, gpus_per_node: int) -> str:
    """Return the most nodes that can share each batch of the ramp, by micro-batch; – if one node
    can't."""
    # The run's micro-batch, a half, a quarter and an eighth of it.
    micro_batches = [run.micro_batch >> halvings for halvings in range(4)]
    micro_batches = [size for size in micro_batches if size]
    ramp = run.clap.train.batch_ramp or [[0, run.batch_sizes().global_batch]]
    rows = []
    for start, batch in ramp:
        row = [f"{start:,}", f"{batch:,}"]
        for size in micro_batches:
            num_nodes, remainder = divmod(batch, size * gpus_per_node)
            row.append("–" if remainder else f"{num_nodes:,}")
        rows.append(row)
    columns = [f"nodes at micro-batch {size}" for size in micro_batches]
    return markdown_table(["from sample", "global batch", *columns], rows)


def make_plan(run: RunSettings, gpu: Gpu, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the JSON report: memory at the largest scale, step time at the smallest."""
    from clap_ds.planning.prediction import predict  # imports torch

    nodes = sorted(set(arguments.nodes))
    prediction = predict(
        run,
        gpu,
        nodes[0] * arguments.gpus_per_node,
        nodes[-1] * arguments.gpus_per_node,
        find_micro_batch=arguments.find_micro_batch,
    )
    # Of one rank's step.
    num_samples = run.micro_batch * run.gradient_accumulation_steps
    return {
        "predicted": True,
        "preset": run.clap.preset().name,
        "precision": run.precision,
        "gpu": gpu.name,
        "micro_batch": run.micro_batch,
        "context_length": run.clap.context_length,
        "text": "packed" if run.clap.packs_captions else "padded",
        **prediction,
        "scales": predict_scales(num_samples, prediction, gpu, nodes, arguments),
        "assumed": list_assumptions(gpu, prediction, arguments),
    }


def predict_scales(
    num_samples: int,
    prediction: dict[str, Any],
    gpu: Gpu,
    nodes: list[int],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Predict throughput and efficiency per node count: a step and what communication adds to it.

    Ranges reach down to the jitter of the published runs: their growth with nodes, by as many
    seconds or as large a share, of every estimate of the step. `num_samples` are those of a rank's
    step.
    """
    step_s = prediction["step_s"]["step"]
    # Every step time, with both kinds of growth.
    published_laws = [
        _scaling_law(num_samples, seconds, fraction)
        for seconds in step_s.values()
        for fraction in (0, 1)
    ]
    rows: list[dict[str, Any]] = []
    # Of the smallest scale.
    first_rates: dict[str, float] = {}
    for num_nodes in nodes:
        cluster = make_cluster(num_nodes, gpu, arguments)
        costs_s = {estimate: added_s(prediction, cluster, nodes, estimate) for estimate in step_s}
        # Samples per second and GPU.
        rates = {
            estimate: num_samples / (seconds + sum(costs_s[estimate].values()))
            for estimate, seconds in step_s.items()
        }
        first_rates = first_rates or rates
        # In percent of the smallest scale's rate under the same law.
        efficiencies = [100 * rates[estimate] / first_rates[estimate] for estimate in rates]
        efficiencies += [100 * law.rate(num_nodes) / law.rate(nodes[0]) for law in published_laws]
        published_rates = [law.rate(num_nodes) for law in published_laws]
        row: dict[str, Any] = {
            "nodes": num_nodes,
            "gpus": cluster.num_gpus,
            "efficiency_percent": 100 * rates["middle"] / first_rates["middle"],
            "efficiency_percent_range": [min(efficiencies), max(efficiencies)],
            "samples_per_s_per_gpu": {**rates, "low": min(rates["low"], *published_rates)},
            "samples_per_s": cluster.num_gpus * rates["middle"],
            "added_s": costs_s["middle"],
        }
        if arguments.samples:
            row["hours"] = arguments.samples / row["samples_per_s"] / 3600
            row["gpu_hours"] = cluster.num_gpus * row["hours"]
        rows.append(row)
    return rows


def make_cluster(num_nodes: int, gpu: Gpu, arguments: argparse.Namespace) -> Cluster:
    network = arguments.network_gbytes_per_s
    if network is None:
        network = ADAPTER_GBYTES_PER_S * arguments.gpus_per_node
    return Cluster(num_nodes, arguments.gpus_per_node, gpu.link_gbytes_per_s, network)


def added_s(
    prediction: dict[str, Any], cluster: Cluster, nodes: list[int], estimate: str
) -> dict[str, float]:
    """Return the seconds that a cluster adds to a step on the smallest one, by cause: communication
    and the loss over more samples."""
    traffic = Traffic(**prediction["traffic"])
    first_s = prediction["step_s"]["loss"][estimate]
    # The loss's products and similarities grow with the number of GPUs.
    slope_s = 0.0
    if nodes[-1] > nodes[0]:
        slope_s = (prediction["largest_loss_s"][estimate] - first_s) / (nodes[-1] - nodes[0])
    growth_s = slope_s * (cluster.num_nodes - nodes[0])
    columns_s = traffic.columns_s * (1 + growth_s / first_s)
    costs_s = communication_s(replace(traffic, columns_s=columns_s), cluster, estimate)
    return {**costs_s, "loss over more samples": growth_s}


def _scaling_law(num_samples: int, step_s: float, seconds_fraction: float) -> ScalingFit:
    """Return the law of a step of `step_s` on the smallest scale.

    It grows by `seconds_fraction` of the published growth in seconds, and by the other part of the
    published growth relative to the step.
    """
    # Columns: nodes, and samples/s/GPU.
    path = PUBLISHED_DIR / f"{GROWTH_SERIES}.csv"
    table = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 2))
    points = tuple((int(num_nodes), float(rate)) for num_nodes, rate in table)
    published = Series(GROWTH_SERIES, points).fit(DEFAULT_FIT)
    batch = PUBLISHED_TABLES[GROWTH_SERIES]["batch_per_gpu"]
    # Seconds per sample → per step.
    growth = seconds_fraction * batch + (1 - seconds_fraction) * step_s / published.start_s
    return ScalingFit(
        published.shape, step_s / num_samples, growth * published.slope_s / num_samples
    )


def list_assumptions(
    gpu: Gpu, prediction: dict[str, Any], arguments: argparse.Namespace
) -> list[str]:
    """Return sentences on the data sheet, kernels, the efficiencies of the slowest classes, the
    network and the growth with nodes."""
    cluster = make_cluster(1, gpu, arguments)
    # Slowest first.
    by_time = sorted(prediction["classes"].items(), key=lambda item: -item[1]["kernels_s"])
    shares = []
    for name, efficiency in by_time[:MAX_CLASSES]:
        low = 100 * efficiency["low"]
        high = 100 * efficiency["high"]
        milliseconds = 1000 * efficiency["kernels_s"]
        source = efficiency["source"]
        shares.append(f"{name} {low:.0f}–{high:.0f}% ({milliseconds:.0f} ms; {source})")
    triton = prediction["triton"]
    return [
        f"{gpu.device_name}: {gpu.bf16_tflops:g} TFLOPS in 16 bits, {gpu.memory_tbytes_per_s:g} TB/s, {gpu.memory_gib:g} GiB,"
        f" {gpu.link_gbytes_per_s:g} GB/s to other GPUs of the node ({gpu.source})",
        *([triton] if triton else []),
        f"share of these peaks reached: {'; '.join(shares)}; others: clap_ds/planning/roofline.py",
        f"{cluster.network_gbytes_per_s:g} GB/s from a node to the others; no jitter of nodes and no"
        " waiting for data",
        f"low ends of ranges: step time grows with nodes as {DEFAULT_FIT}, as in the published runs"
        f" ({GROWTH_SERIES}), by as many seconds or as large a share",
    ]


def render(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    assumptions = "\n".join(f"- {assumption}" for assumption in report["assumed"])
    scales = report["scales"]
    tables = [_memory_table(report), _time_table(report), _scale_table(scales)]
    if len(scales) > 1:
        tables.append(_added_table(scales))
    return "\n\n".join([_summarize(report), *tables, f"Assumed:\n{assumptions}"])


def _summarize(report: dict[str, Any]) -> str:
    micro_batch = report["largest_micro_batch"]
    return (
        "## Predicted, not measured: {preset} on {gpu}, {precision}, micro-batch {micro_batch}, {context_length} text"
        " tokens, {text}\n\n{attention} attention, {mlp} MLPs, {text_attention} text attention, compile"
        " {compile}.\n\n{memory_gpus:,} GPUs: **{verdict}**, {peak_memory_gib:.1f} of {device_memory_gib:.1f}"
        " GiB{largest}.\n\n{step_gpus:,} GPUs: **{middle:,.0f} samples/s/GPU** ({low:,.0f}–{high:,.0f}) without communication."
    ).format(
        verdict="fits" if report["fits"] else "does NOT fit",
        largest=f"; largest micro-batch {micro_batch}" if micro_batch else "",
        **report["samples_per_s_per_gpu"],
        **report,
    )


def _memory_table(report: dict[str, Any]) -> str:
    # Parts that would print as 0.00 are omitted.
    rows = [[part, f"{gib:.2f}"] for part, gib in report["memory_gib"].items() if gib >= 0.005]
    return markdown_table([f"peak memory, {report['memory_gpus']:,} GPUs", "GiB"], rows)


def _time_table(report: dict[str, Any]) -> str:
    rows = []
    for part, step_s in report["step_s"].items():
        milliseconds = [f"{1000 * seconds:.1f}" for seconds in step_s.values()]
        rows.append([part, *milliseconds])
    header = [f"step, {report['step_gpus']:,} GPUs", "ms at low efficiency", "middle", "high"]
    return markdown_table(header, rows)


def _scale_table(scales: list[dict[str, Any]]) -> str:
    """Format throughput by scale, with hours if the number of samples is known."""
    durations = [name for name in ("hours", "gpu_hours") if name in scales[0]]
    header = ["nodes", "GPUs", "samples/s/GPU", "efficiency, %", "range", "samples/s", *durations]
    rows = []
    for scale in scales:
        low, high = scale["efficiency_percent_range"]
        row = [
            str(scale["nodes"]),
            str(scale["gpus"]),
            f"{scale['samples_per_s_per_gpu']['middle']:,.0f}",
            f"{scale['efficiency_percent']:.1f}",
            f"{low:.1f}–{high:.1f}",
            f"{scale['samples_per_s']:,.0f}",
        ]
        rows.append(row + [significant(scale[name]) for name in durations])
    return markdown_table(header, rows)


def _added_table(scales: list[dict[str, Any]]) -> str:
    """Format what communication adds to a step by scale."""
    rows = []
    for cause in scales[0]["added_s"]:
        milliseconds = [f"{1000 * scale['added_s'][cause]:.1f}" for scale in scales]
        rows.append([cause, *milliseconds])
    header = ["added to a step, ms", *(f"{scale['gpus']:,} GPUs" for scale in scales)]
    return markdown_table(header, rows)


if __name__ == "__main__":
    run_alone(main)
