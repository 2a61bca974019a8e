"""Profile steps of this engine on a GPU, and join the kernels' times to the run's plan.

    python -m benchmarks.plan_validation --deepspeed_config RUN   # profile two steps on one rank
    python -m benchmarks.plan_validation --profiles FOLDER --output results/h200/efficiencies.md

A profile is saved as `profile.json` and `trace.json.gz` in the run directory. It is joined to the
operations of the run's plan by name and input shapes. The result is each class of operations' share
of the data sheet's rates, and the device's idle time.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import make_parser, show, table
from clap_ds.config.arguments import add_config
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import Ranks, run_command
from clap_ds.flop_count.device_specs import Gpu, find_peak, gpu_named
from clap_ds.metrics.timers import StepTimer
from clap_ds.planning.roofline import EFFICIENCY, FUSED, ideal_s, op_class
from clap_ds.planning.step import compiled_kernels, trace_step
from clap_ds.planning.tracing import Operation
from clap_ds.run import join_ranks, open_run_dir, setup_dataloader, setup_engine, setup_model
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.files import read_json
from clap_ds.utils.paths import commit

WARM_UP = 5
STEPS = 2
# Name prefixes of Inductor's kernels.
INDUCTORS = ("triton_poi", "triton_red", "triton_per", "triton_for")
CLASSES = "class {class} | efficiency {efficiency:.1%} | ms per step {ms:.3f} | kernels per step {kernels:g}"
UNPLANNED = "not in the plan: "


def profile(run: RunSettings, ranks: Ranks) -> None:
    """Profile steps of a run to `profile.json`: each operation's caller (index in the list), name,
    input shapes, and own kernels with microseconds (on a CPU its self time)."""
    # It would change the operations.
    run.deepspeed.pop("flops_profiler", None)
    with join_ranks(run, ranks) as device, open_run_dir(run, ranks, device) as record:
        engine = setup_engine(run, ranks, setup_model(run, ranks, device), StepTimer(device))
        with setup_dataloader(run, ranks, engine) as loader:
            record.update_summary(engine.optimize_towers(loader, run.clap.model, run.clap.compile))
            # Compilation and autotuning end here.
            for _ in range(WARM_UP):
                engine.step(loader)
            with torch.profiler.profile(record_shapes=True) as profiler:
                for _ in range(STEPS):
                    engine.step(loader)
                float(engine.is_skipped)  # waits for the device
        events = events_of(profiler, on_cpu=device.type == "cpu")
        (record.path / "profile.json").write_text(json.dumps({"events": events}))
        profiler.export_chrome_trace(str(record.path / "trace.json.gz"))


def events_of(profiler: torch.profiler.profile, *, on_cpu: bool) -> list[Any]:
    """Return the profiled operations as in `profile.json`."""
    operations = [
        event
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CPU
    ]
    indices: dict[int | None, int] = {id(event): index for index, event in enumerate(operations)}
    events = []
    for event in operations:
        kernels = [(kernel.name, kernel.duration) for kernel in event.kernels]
        # A CPU has no kernels of its own.
        if on_cpu:
            kernels = [("", event.self_cpu_time_total)]
        caller = indices.get(id(event.cpu_parent))
        events.append((caller, event.name, event.input_shapes, kernels))
    return events


def join(
    profiled: Any, planned: Iterable[tuple[Operation, float]], ideal_s: Callable[[Operation], float]
) -> dict[str, dict[str, float]]:
    """Return, by class of operations, the longest first, the fraction of the data sheet's rates
    that is reached, and seconds and kernels per step.

    Unplanned operations are listed by name without a fraction; Inductor's kernels are one class.

    Args:
        ideal_s: seconds of an operation at the data sheet's rates.
    """
    # Planned operations by name and shapes.
    plans = defaultdict[Any, list[Operation]](list)
    ideal = defaultdict[str, float](float)
    for operation, times in planned:
        if op_class(operation) == FUSED:
            # Inductor's kernels have no shapes to join by.
            ideal[FUSED] += STEPS * times * ideal_s(operation)
        else:
            plans[operation.name, operation.shapes].append(operation)
    # Of each event, the planned operations that it or its caller is, and that one's index.
    owners: list[tuple[list[Operation], int]] = []
    measured_s = defaultdict[str, float](float)
    calls = defaultdict[str, set[int]](set)
    for index, (caller, name, shapes, kernels) in enumerate(profiled["events"]):
        owner = _find_plan(plans, name, shapes), index
        # What a planned operation calls belongs to it.
        if caller is not None and owners[caller][0]:
            owner = owners[caller]
        owners.append(owner)
        for kernel, duration_us in kernels:
            operations, call = owner
            # Batches are copied beside the kernels.
            if kernel.startswith("Memcpy HtoD"):
                operations = []
            if operations:
                class_name = op_class(operations[0])
                if call not in calls[class_name]:
                    ideal[class_name] += sum(map(ideal_s, operations)) / len(operations)
            elif ideal[FUSED] and kernel.startswith(INDUCTORS):
                class_name = FUSED
            else:
                class_name = UNPLANNED + name
            # An operation may launch several kernels, of one call.
            measured_s[class_name] += duration_us / 1e6
            calls[class_name].add(call)
    classes = {}
    for class_name, spent_s in sorted(measured_s.items(), key=lambda item: -item[1]):
        if not spent_s:
            continue
        figures = {}
        if ideal[class_name]:
            figures["efficiency"] = ideal[class_name] / spent_s
        figures["seconds"] = spent_s / STEPS
        figures["kernels"] = len(calls[class_name]) / STEPS
        classes[class_name] = figures
    return classes


def _find_plan(plans: Mapping[Any, list[Operation]], name: str, shapes: Any) -> list[Operation]:
    """Return the planned operations of this name and these shapes; empty if there are none."""
    planned_name = name.replace("::", ".", 1)
    inputs = tuple(tuple(shape) for shape in shapes if shape)
    # The last input may be an `out=`.
    for key in ((planned_name, inputs), (planned_name, inputs[:-1])):
        if key in plans:
            return plans[key]
    return []


def describe_idle(trace: dict[str, Any]) -> str:
    """Return how long the device's busiest stream was idle per step, and between which kernels
    longest. From a Chrome trace."""
    # By stream: events of the device.
    streams = defaultdict[Any, list[dict[str, Any]]](list)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams[event["args"]["stream"]].append(event)
    busiest: list[dict[str, Any]] = max(streams.values(), key=len, default=[])
    # In the order in which they ran.
    kernels = sorted(busiest, key=lambda event: float(event["ts"]))
    # Microseconds.
    gaps = [(b["ts"] - a["ts"] - a["dur"], a["name"], b["name"]) for a, b in pairwise(kernels)]
    if not gaps:
        return "no kernels in the trace"
    idle_ms = sum(max(0.0, gap) for gap, *_ in gaps) / STEPS / 1000
    longest, *names = max(gaps, key=lambda gap: float(gap[0]))
    between = " and ".join(f"`{name[:60]}`" for name in names)
    return f"Idle {idle_ms:.1f} ms per step; longest {longest / 1000:.1f} ms, between {between}."


def join_profile(path: Path, gpu: Gpu | None) -> dict[str, dict[str, float]]:
    """Join a profile to its run's plan. UserError if its device is unknown, or it has no times."""
    run = load_run(path.with_name("config.json"), 1)
    summary = read_json(path.with_name("summary.json"))
    device = summary["device_name"]
    gpu = gpu or find_peak(device)
    if gpu is None or not gpu.memory_tbytes_per_s:
        advice = "pass --gpu with a GPU name of clap-ds plan"
        raise UserError(f"{path}: no known rates for {device!r}; {advice}")
    # The kernels that `auto` chose.
    choices = summary.get("kernels", {})
    kernels = {f"{part}_impl": choice["kernel"] for part, choice in choices.items()}
    model = run.clap.model.model_copy(update=kernels)
    run.clap = run.clap.model_copy(update={"model": model})
    fused = compiled_kernels(run, run.micro_batch) if "compiled" in summary else []
    step = trace_step(run, run.micro_batch, cuda=summary["device_type"] == "cuda")
    classes = join(read_json(path), step.work(fused), partial(ideal_s, gpu=gpu))
    if not classes:
        raise UserError(f"{path}: no kernel times; check that torch.profiler can use CUPTI")
    return classes


def show_efficiencies(folder: Path, gpu: Gpu | None, output: Path | None) -> None:
    """Show the classes of all profiles below a folder, each joined to its run's plan. UserError if
    there is none."""
    texts = list[str]()
    efficiencies = dict[str, Any]()
    device = ""
    for path in sorted(folder.rglob("profile.json"), key=lambda path: path.stat().st_mtime):
        classes = join_profile(path, gpu)
        rows = [
            {"class": name, "ms": 1000 * figures["seconds"], **figures}
            for name, figures in classes.items()
        ]
        texts.append(f"## {path.parent}\n\n{table(CLASSES, rows)}")
        trace = path.with_name("trace.json.gz")
        if trace.exists():
            texts.append(describe_idle(json.loads(gzip.decompress(trace.read_bytes()))))
        summary = read_json(path.with_name("summary.json"))
        device = summary["device_name"]
        # Use the compiled run for Inductor's kernels and the eager run, which has all others, for
        # the rest.
        is_compiled = "compiled" in summary
        for name, figures in classes.items():
            if name in EFFICIENCY and (name == FUSED) == is_compiled:
                efficiencies[name] = figures
    if not texts:
        raise UserError(
            f"{folder}: no profile.json below it; create one with --deepspeed_config RUN"
        )
    text = "\n\n".join([f"# Shares of the data sheet's rates, {device}", *texts])
    show(output, text, {"device": device, "commit": commit(), "classes": efficiencies})


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_config(parser, required=False)
    add = parser.add_argument
    profiles = "folder of profiles to join to their plans"
    add("--profiles", type=Path, metavar="FOLDER", help=profiles)
    gpu = "GPU name of clap-ds plan, if the profile's device is unknown"
    add("--gpu", type=gpu_named, help=gpu)
    options = parser.parse_args(argv)
    if options.config:
        run_command(lambda ranks: profile(load_run(options.config, 1, options.set), ranks))
    if options.profiles:
        show_efficiencies(options.profiles, options.gpu, options.output)


if __name__ == "__main__":
    run_alone(main)
