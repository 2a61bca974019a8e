"""Command: whether a run fits a GPU, how fast it will be and what it will cost, predicted without a GPU.

    clap-plan --deepspeed_config RUN --gpu h100-sxm --nodes 1 4 16 --gpus_per_node 4 [--find_micro_batch] [--json]

A training step is recorded on tensors without contents, with the operations that CUDA would run; GPUs' rates are data sheets',
of which shares are assumed. How efficiency falls with scale is taken from the published runs. docs/planning.md says what to
trust.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.runs import PRICE_OPTIONS, add_options
from clap_ds.analysis.step_model import Machine, StepModel, Workload, method_of
from clap_ds.analysis.table import markdown_table, significant
from clap_ds.analysis.weak_scaling import read_series
from clap_ds.config.arguments import whole_number
from clap_ds.config.batch_sizes import GLOBAL_BATCH, MICRO_BATCH
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.flop_count.peaks import Gpu, gpu_named

if TYPE_CHECKING:
    from clap_ds.planning.step import Step

MOST_GPUS = 2**16
"""Whose loss is recorded tile by tile in some 20 s."""
DELAYS_FROM = "jupiter_htsat_tiny"
"""The published series whose waiting for the slowest rank is assumed."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="clap-plan", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--deepspeed_config", type=Path, required=True, metavar="RUN", help="JSON file, or a packaged one's name")
    add("--gpu", required=True, help="such as h100-sxm; a wrong name lists them")
    add("--nodes", type=whole_number(), nargs="+", default=[1], metavar="N", help="scales (default: 1)")
    add("--gpus_per_node", type=whole_number(), default=4, metavar="N", help="default: 4")
    add("--micro_batch", type=whole_number(), metavar="B", help="in place of the run's")
    add("--text_tokens", type=whole_number(2), metavar="L", help="caption length in place of the run's")
    told = "what the model is fed: with mel, log-mel features of prepared shards, there is no STFT (default: waveform)"
    add("--audio", choices=("waveform", "mel"), default="waveform", help=told)
    add("--find_micro_batch", action="store_true", help="look for the largest multiple of 8 that fits")
    add_options(parser, "--node_gbytes_per_s", *PRICE_OPTIONS)
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Plan and print; a UserError for a bad configuration, GPU or caption length."""
    arguments = parse_arguments(argv)
    if (most := max(arguments.nodes) * arguments.gpus_per_node) > MOST_GPUS:
        raise UserError(f"--nodes, --gpus_per_node: plans are made for up to {MOST_GPUS:,} GPUs, found {most:,}")
    if arguments.price_per_gpu_hour and not arguments.samples:
        raise UserError("--price_per_gpu_hour: needs --samples, the number to train on")
    smallest = min(arguments.nodes) * arguments.gpus_per_node
    gpu, run = gpu_named(arguments.gpu), _changed(load_run(arguments.deepspeed_config, smallest), arguments)
    os.environ["DS_ACCELERATOR"] = "cpu"  # whatever this machine has, nothing is computed
    try:
        report = make_plan(run, gpu, arguments)
    except ValueError as error:
        raise UserError(f"{run.path}: {error}") from error
    print(json.dumps(report, indent=2, ensure_ascii=False) if arguments.json else render(report))


def _changed(run: RunSettings, arguments: argparse.Namespace) -> RunSettings:
    clap, micro_batch = run.clap, arguments.micro_batch
    if arguments.text_tokens:
        longest = clap.preset().text.max_tokens
        if arguments.text_tokens > longest:
            reserved = " (of RoBERTa's 514, two are reserved)" if longest == 512 else ""
            wanted = f"{clap.model.preset} has positions for {longest}{reserved}"
            raise UserError(f"--text_tokens {arguments.text_tokens}: {wanted}")
        data = clap.data.model_copy(update={"caption_lengths": None}) if clap.data.source == "synthetic" else clap.data
        clap = clap.model_copy(update={"text_tokens": arguments.text_tokens, "data": data})
    deepspeed = dict(run.deepspeed)
    if micro_batch:
        deepspeed[MICRO_BATCH] = micro_batch
        deepspeed.pop(GLOBAL_BATCH, None)
    return RunSettings(run.path, clap, deepspeed)


def make_plan(run: RunSettings, gpu: Gpu, arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON report."""
    from clap_ds.planning.memory import largest_micro_batch, memory_parts
    from clap_ds.planning.step import check_plannable, trace_loss, trace_step

    check_plannable(run)
    nodes, per_node = sorted(set(arguments.nodes)), arguments.gpus_per_node
    smallest, largest = nodes[0] * per_node, nodes[-1] * per_node
    if GLOBAL_BATCH in run.deepspeed and smallest != largest:
        given = f"{GLOBAL_BATCH} {run.deepspeed[GLOBAL_BATCH]} holds at one scale, --nodes gives {len(nodes)}"
        raise ValueError(f"{given}; expected one, or {MICRO_BATCH} (--micro_batch), which holds at all")
    few, many = (trace_loss(run, run.micro_batch, ranks).peak_bytes for ranks in (smallest, largest))
    loss_bytes = max(0, many - few)

    def peak_gib(step: Step) -> float:
        extra = loss_bytes * step.micro_batch // run.micro_batch
        return sum(memory_parts(step, largest, extra).values())

    traced = partial(trace_step, world_size=smallest, front_end=arguments.audio == "waveform")
    own = traced(run, run.micro_batch)
    found = None
    if arguments.find_micro_batch:
        peaks = {run.micro_batch: peak_gib(own)}
        found = largest_micro_batch(
            lambda size: peaks.get(size) or peak_gib(traced(run, size)), run.micro_batch, gpu.memory_gib
        )
    chosen = _speed(own, gpu, run.clap.compile != "off")
    return {
        "predicted": True, "preset": run.clap.model.preset, "precision": run.precision, "gpu": gpu.name,
        "audio": arguments.audio, "micro_batch": run.micro_batch, "text_tokens": run.clap.text_tokens, "text": run.clap.text,
        "attention": _kernel(run.clap.model.attention, "sdpa"), "mlp": _kernel(run.clap.model.mlp, "torch"),
        "compile": run.clap.compile, "fits": peak_gib(own) <= gpu.memory_gib, "peak_memory_gib": peak_gib(own), **chosen,
        "device_memory_gib": gpu.memory_gib, "largest_micro_batch": found,
        "memory_gib": memory_parts(own, largest, loss_bytes),
        "parameters": own.num_parameters,
        "scales": _scales(run, gpu, chosen, own.num_parameters, nodes, arguments),
        "assumed": _assumed(run, gpu, arguments),
    }  # fmt: skip


def _kernel(setting: str, without_triton: str) -> str:
    return without_triton if setting == "auto" else setting


def _speed(step: Step, gpu: Gpu, compiled: bool) -> dict[str, Any]:
    """Of one GPU of the smallest scale, what it sends left out."""
    from clap_ds.planning.roofline import fused, rates_of, seconds_by_part

    recorded = [each for each in step.recorded.operations if not each.is_collective]
    operations = [(each, step.times(each)) for each in (fused(recorded) if compiled else recorded)]
    by_case = {case: seconds_by_part(operations, rates) for case, rates in rates_of(gpu).items()}
    return {
        "samples_per_s_per_gpu": {case: step.num_samples / parts["step"] for case, parts in by_case.items()},
        "step_s": {part: {case: parts[part] for case, parts in by_case.items()} for part in by_case["middle"]},
        "tflop": sum(times * each.flops for each, times in operations) / 1e12,
        "gigabytes_moved": sum(times * each.bytes_moved for each, times in operations) / 1e9,
        "kernels": round(sum(times * each.launches for each, times in operations)),
    }


def _scales(
    run: RunSettings, gpu: Gpu, chosen: dict[str, Any], num_parameters: int, nodes: Sequence[int],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rates and efficiency at each number of nodes. They are between those of two cases: waiting for the slowest rank is as
    long as in the published runs, or as long a share of the step."""
    published = read_series(PUBLISHED_DIR / f"{DELAYS_FROM}.csv").fit()
    accumulated = run.gradient_accumulation_steps
    by_case: dict[str, list[float]] = {}
    for case in ("low", "middle", "high"):
        seconds = {part: cases[case] / accumulated for part, cases in chosen["step_s"].items()}
        shrink = seconds["step"] / published.step_s(1)
        model = StepModel(
            Workload(run.micro_batch, run.clap.preset().joint_dim, num_parameters / accumulated, arguments.gpus_per_node),
            Machine(1e9 * arguments.node_gbytes_per_s, 1e9 * gpu.link_gbytes_per_s, Machine().latency_s,
                    1e12 * gpu.bf16_tflops, 1e12 * gpu.memory_tbytes_per_s),
            method_of(run.resolved()),
            compute_s=seconds["step"] - seconds["loss"],
            window_s=seconds.get("audio backward", 0) + seconds.get("text backward", 0),
            shape=published.shape,
        )  # fmt: skip
        shares = {"low": 1.0, "middle": (1 + shrink) / 2, "high": shrink}
        by_case[case] = [replace(model, delay_s=published.delay_s * shares[case]).rate(n) for n in nodes]
    price, rows = arguments.price_per_gpu_hour, []
    for place, count in enumerate(nodes):
        rates = {case: found[place] for case, found in by_case.items()}
        efficiency = {case: 100 * found[place] / found[0] for case, found in by_case.items()}
        gpus = count * arguments.gpus_per_node
        row: dict[str, Any] = {
            "nodes": count, "gpus": gpus, "efficiency_percent": efficiency["middle"],
            "efficiency_percent_range": sorted(efficiency.values())[::2], "samples_per_s_per_gpu": rates,
            "samples_per_s": gpus * rates["middle"],
        }  # fmt: skip
        if arguments.samples:
            row["hours"] = arguments.samples / row["samples_per_s"] / 3600
            row["gpu_hours"] = gpus * row["hours"]
            row |= {"money": price * row["gpu_hours"]} if price else {}
        rows.append(row)
    return rows


def _assumed(run: RunSettings, gpu: Gpu, arguments: argparse.Namespace) -> list[str]:
    from clap_ds.planning import memory, roofline

    def shares(found: dict[str, float]) -> str:
        return "–".join(f"{100 * value:.0f}" for value in (found["low"], found["high"])) + " %"

    left_open = [name for name in ("attention", "mlp") if getattr(run.clap.model, name) == "auto"]
    auto = f"`auto` of {' and '.join(f'clap.model.{name}' for name in left_open)} is what a GPU takes without Triton's kernels"
    return [
        *(
            [f"{auto}; where these are right, the run takes them: name them in the JSON to plan that"]
            if left_open
            else []
        ),
        f"{gpu.device_name}: {gpu.bf16_tflops:g} TFLOPS bf16, {gpu.memory_tbytes_per_s:g} TB/s, {gpu.memory_gib:g} GiB,"
        f" {gpu.link_gbytes_per_s:g} GB/s to other GPUs of the node ({gpu.source})",
        f"products reach {shares(roofline.PRODUCT_SHARE)} of the peak, fused attention"
        f" {shares(roofline.ATTENTION_SHARE)}, memory {shares(roofline.MEMORY_SHARE)} of its bandwidth; a kernel takes"
        f" {1e6 * roofline.KERNEL_S['high']:g}–{1e6 * roofline.KERNEL_S['low']:g} µs at least",
        "compiled towers: what lies between products is one kernel that reads and writes once; memory as without",
        f"beyond tensors: {memory.CONTEXT_GIB:g} GiB of context, {memory.NCCL_GIB:g} of NCCL with several ranks,"
        f" {100 * memory.FRAGMENTATION:g} % of fragmentation",
        f"{arguments.node_gbytes_per_s:g} GB/s into a node; waiting for the slowest rank as in the published runs"
        f" ({DELAYS_FROM}), unchanged or in proportion to the step; data is always there in time",
    ]


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    verdict = "fits" if report["fits"] else "does NOT fit"
    rate, step = report["samples_per_s_per_gpu"], report["step_s"]
    lines = [
        f"## Predicted, nothing measured: {report['preset']} on {report['gpu']}, {report['precision']}, micro-batch"
        f" {report['micro_batch']}, {report['text_tokens']} text tokens, {report['text']}"
        + (", fed log-mel features" if report["audio"] == "mel" else ""),
        f"{report['attention']} attention, {report['mlp']} MLPs, compile {report['compile']}: **{verdict}**,"
        f" {report['peak_memory_gib']:.1f} of {report['device_memory_gib']:.1f} GiB with {report['scales'][-1]['gpus']:,} GPUs;"
        f" **{rate['middle']:,.0f} samples/s/GPU** ({rate['low']:,.0f}–{rate['high']:,.0f}) before anything is sent.",
    ]  # fmt: skip
    if report["largest_micro_batch"]:
        lines.append(f"Largest micro-batch that fits: {report['largest_micro_batch']}.")
    memory = [[part, f"{gib:.2f}"] for part, gib in report["memory_gib"].items() if gib >= 0.005]
    lines.append(markdown_table(["memory at the peak", "GiB"], memory))
    times = [[part, *(f"{1000 * step[part][case]:.1f}" for case in ("high", "middle", "low"))] for part in step]
    lines.append(markdown_table(["step", "ms at high rates", "middle", "low"], times))
    lines.append(_scale_table(report["scales"]))
    lines.append(
        f"{report['gigabytes_moved']:.0f} GB moved and {report['kernels']:,} kernels a step, {report['tflop']:.1f} TFLOP."
    )
    lines.append("Assumed:\n" + "\n".join(f"- {each}" for each in report["assumed"]))
    return "\n\n".join(lines)


def _scale_table(scales: list[dict[str, Any]]) -> str:
    extra = [name for name in ("hours", "gpu_hours", "money") if name in scales[0]]
    header = ["nodes", "GPUs", "samples/s/GPU", "efficiency, %", "range", "samples/s"]
    rows = [
        [str(each["nodes"]), str(each["gpus"]), f"{each['samples_per_s_per_gpu']['middle']:,.0f}",
         f"{each['efficiency_percent']:.1f}", "{:.1f}–{:.1f}".format(*each["efficiency_percent_range"]),
         f"{each['samples_per_s']:,.0f}", *(significant(each[name]) for name in extra)]
        for each in scales
    ]  # fmt: skip
    return markdown_table([*header, *(name.replace("_", "-") for name in extra)], rows)


def command() -> None:
    """Console command `clap-plan`."""
    run_alone(main)


if __name__ == "__main__":
    command()
