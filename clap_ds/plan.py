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
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from clap_ds.analysis.published import PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.table import markdown_table, significant
from clap_ds.analysis.weak_scaling import USUAL, Law, Series
from clap_ds.config.arguments import add_config, add_json, make_parser, positive, whole_number
from clap_ds.config.batch_sizes import GLOBAL_BATCH
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.flop_count.device_specs import Gpu, gpu_named
from clap_ds.inference.options import check_output
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.files import show_results

if TYPE_CHECKING:
    from clap_ds.planning.step import Step
    from clap_ds.planning.tracing import Operation

MOST_CLASSES = 4  # operation classes printed with their efficiencies
GROWS_AS = "jupiter_htsat_tiny"
"""Published series whose step-time growth with nodes is assumed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Predict and print. Raises UserError for a bad configuration or GPU, or a fixed global batch
    at several scales."""
    parser = make_parser(__doc__)
    add_config(parser)
    add = parser.add_argument
    add(
        "--gpu",
        required=True,
        metavar="NAME",
        help="plan for this GPU, e.g. h100-sxm; an unknown name lists all",
    )
    add(
        "--nodes",
        type=whole_number(),
        nargs="+",
        default=[1],
        metavar="N",
        help="plan for these numbers of nodes",
    )
    add("--gpus_per_node", type=whole_number(), default=4, metavar="N", help="set GPUs per node")
    add("--find_micro_batch", action="store_true", help="find the largest multiple of 8 that fits")
    add(
        "--ramp",
        action="store_true",
        help="only print how many nodes each batch of clap.train.batch_ramp can use",
    )
    add(
        "--samples",
        type=positive,
        metavar="N",
        help="estimate hours for this many training samples, repeats included",
    )
    add_json(parser)
    arguments = parser.parse_args(argv)
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


def ramp_table(run: RunSettings, gpus_per_node: int) -> str:
    """Return the most nodes that can share each batch of the ramp, by micro-batch; – if one node
    can't."""
    sizes = [size for size in (run.micro_batch >> shift for shift in range(4)) if size]
    ramp = run.clap.train.batch_ramp or [[0, run.batch_sizes().global_batch]]

    def nodes(batch: int, size: int) -> str:
        count, left = divmod(batch, size * gpus_per_node)
        return "–" if left else f"{count:,}"

    rows = [
        [f"{start:,}", f"{batch:,}", *(nodes(batch, size) for size in sizes)]
        for start, batch in ramp
    ]
    return markdown_table(
        ["from sample", "global batch", *(f"nodes at micro-batch {size}" for size in sizes)], rows
    )


def make_plan(run: RunSettings, gpu: Gpu, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the JSON report: memory at the largest scale, step time at the smallest."""
    import torch

    from clap_ds.engine.compile import resolve_compile_mode
    from clap_ds.model.kernels import select_kernels
    from clap_ds.planning.step import (
        compiled_kernels,
        largest_micro_batch,
        memory_parts,
        trace_step,
    )

    nodes = sorted(set(arguments.nodes))
    smallest, largest = (count * arguments.gpus_per_node for count in (nodes[0], nodes[-1]))
    step_of = cache(partial(trace_step, run))

    def memory(micro_batch: int) -> dict[str, float]:
        return memory_parts(step_of(micro_batch, largest), largest)

    own = step_of(run.micro_batch, smallest)
    parts = memory(run.micro_batch)
    found = None
    if arguments.find_micro_batch:
        found = largest_micro_batch(
            lambda size: sum(memory(size).values()), run.micro_batch, gpu.memory_gib
        )
    cuda = torch.device("cuda")
    kernels = select_kernels(run.clap.model, cuda)
    what = resolve_compile_mode(run.clap.compile, cuda)
    speed = _speed(own, gpu, compiled_kernels(run, run.micro_batch) if what != "off" else [])
    return {
        "predicted": True, "preset": run.clap.preset().name, "precision": run.precision, "gpu": gpu.name,
        "micro_batch": run.micro_batch, "context_length": run.clap.context_length,
        "text": "packed" if run.clap.text_packing else "padded",
        **kernels._asdict(), "compile": what,
        "memory_gpus": largest, "fits": sum(parts.values()) <= gpu.memory_gib, "peak_memory_gib": sum(parts.values()),
        "device_memory_gib": gpu.memory_gib, "largest_micro_batch": found, "memory_gib": parts,
        "step_gpus": smallest, **speed, "parameters": own.num_parameters,
        "scales": _scales(own.num_samples, speed["step_s"]["step"], nodes, arguments),
        "assumed": _assumed(gpu, speed["classes"]),
    }  # fmt: skip


def _speed(step: Step, gpu: Gpu, kernels: Sequence[Operation]) -> dict[str, Any]:
    """Predict one GPU's speed at the smallest scale, without communication."""
    from clap_ds.planning.roofline import CASES, class_of, seconds, seconds_by_part, shares_of

    work = step.work(kernels)
    shares = shares_of(gpu)
    by_class = defaultdict[str, float](float)
    for each, times in work:
        by_class[class_of(each)] += times * seconds(each, gpu, shares, "middle")
    by_case = {case: seconds_by_part(work, gpu, shares, case) for case in CASES}
    return {
        "classes": {
            name: {"kernels_s": spent_s, **shares[name]} for name, spent_s in by_class.items()
        },
        "samples_per_s_per_gpu": {
            case: step.num_samples / parts["step"] for case, parts in by_case.items()
        },
        "step_s": {
            part: {case: parts.get(part, 0.0) for case, parts in by_case.items()}
            for part in by_case["high"]
        },
        "tflop": sum(times * each.flops for each, times in work) / 1e12,
    }


def _scales(
    num_samples: int, step_s: dict[str, float], nodes: list[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Predict throughput and efficiency per node count with the law that best predicted the
    published runs.

    Ranges cover all step times, each growing by as many seconds or as large a share as published;
    the middle, half each.
    """
    table = np.loadtxt(PUBLISHED_DIR / f"{GROWS_AS}.csv", delimiter=",", skiprows=1, usecols=(0, 2))
    published = Series(GROWS_AS, tuple((int(count), float(rate)) for count, rate in table)).fit(
        USUAL
    )
    batch = PUBLISHED_TABLES[GROWS_AS]["batch_per_gpu"]

    def law(case: str, in_seconds: float) -> Law:
        growth = in_seconds * batch + (1 - in_seconds) * step_s[case] / published.start_s
        return Law(
            published.shape, step_s[case] / num_samples, growth * published.slope_s / num_samples
        )

    middle = law("middle", 0.5)
    laws = [law(case, each) for case in step_s for each in (0, 1)]
    rows = []
    for count in nodes:
        rate = middle.rate(count)
        rates = [each.rate(count) for each in laws]
        gpus = count * arguments.gpus_per_node
        efficiencies = [100 * each.rate(count) / each.rate(nodes[0]) for each in laws]
        row: dict[str, Any] = {
            "nodes": count, "gpus": gpus, "efficiency_percent": 100 * rate / middle.rate(nodes[0]),
            "efficiency_percent_range": [min(efficiencies), max(efficiencies)],
            "samples_per_s_per_gpu": {"low": min(rates), "middle": rate, "high": max(rates)},
            "samples_per_s": gpus * rate,
        }  # fmt: skip
        if arguments.samples:
            row["hours"] = arguments.samples / row["samples_per_s"] / 3600
            row["gpu_hours"] = gpus * row["hours"]
        rows.append(row)
    return rows


def _assumed(gpu: Gpu, classes: dict[str, dict[str, Any]]) -> list[str]:
    shares = [
        f"{name} {100 * each['low']:.0f}–{100 * each['high']:.0f}% ({1000 * each['kernels_s']:.0f} ms; {each['source']})"
        for name, each in sorted(classes.items(), key=lambda item: -item[1]["kernels_s"])[
            :MOST_CLASSES
        ]
    ]
    return [
        f"{gpu.device_name}: {gpu.bf16_tflops:g} TFLOPS bf16, {gpu.memory_tbytes_per_s:g} TB/s, {gpu.memory_gib:g} GiB,"
        f" {gpu.link_gbytes_per_s:g} GB/s to other GPUs of the node ({gpu.source})",
        f"share of these peaks reached: {'; '.join(shares)}; others: clap_ds/planning/roofline.py",
        f"step time grows with nodes as {USUAL}, as in the published runs ({GROWS_AS}): by as many seconds or as large a"
        " share; no waiting for data",
    ]


def render(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    rate = report["samples_per_s_per_gpu"]
    scales = report["scales"]
    largest = f"; largest micro-batch {size}" if (size := report["largest_micro_batch"]) else ""
    title = (
        "## Predicted, not measured: {preset} on {gpu}, {precision}, micro-batch {micro_batch}, {context_length} text"
        " tokens, {text}\n\n{attention} attention, {mlp} MLPs, {text_attention} text attention, compile"
        " {compile}.\n\n{memory_gpus:,} GPUs: **{verdict}**, {peak_memory_gib:.1f} of {device_memory_gib:.1f}"
        " GiB{largest}.\n\n{step_gpus:,} GPUs: **{middle:,.0f} samples/s/GPU** ({low:,.0f}–{high:,.0f}) without communication."
    ).format(
        verdict="fits" if report["fits"] else "does NOT fit", largest=largest, **rate, **report
    )
    memory = [[part, f"{gib:.2f}"] for part, gib in report["memory_gib"].items() if gib >= 0.005]
    times = [
        [part, *(f"{1000 * cases[case]:.1f}" for case in cases)]
        for part, cases in report["step_s"].items()
    ]
    extra = [name for name in ("hours", "gpu_hours") if name in scales[0]]
    header = ["nodes", "GPUs", "samples/s/GPU", "efficiency, %", "range", "samples/s", *extra]
    rows = [
        [str(each["nodes"]), str(each["gpus"]), f"{each['samples_per_s_per_gpu']['middle']:,.0f}",
         f"{each['efficiency_percent']:.1f}", "{:.1f}–{:.1f}".format(*each["efficiency_percent_range"]),
         f"{each['samples_per_s']:,.0f}", *(significant(each[name]) for name in extra)]
        for each in scales
    ]  # fmt: skip
    return "\n\n".join([
        title,
        markdown_table([f"peak memory, {report['memory_gpus']:,} GPUs", "GiB"], memory),
        markdown_table([f"step, {report['step_gpus']:,} GPUs", "ms at low efficiency", "middle", "high"], times),
        markdown_table(header, rows),
        "Assumed:\n" + "\n".join(f"- {each}" for each in report["assumed"]),
    ])  # fmt: skip


if __name__ == "__main__":
    run_alone(main)
