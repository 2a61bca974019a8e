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
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import make_parser, show, table
from clap_ds.config.arguments import add_config
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import Ranks, run_command
from clap_ds.flop_count.device_specs import Gpu, gpu_named, peak_for
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
INDUCTORS = ("triton_poi", "triton_red", "triton_per", "triton_for")
"""Name prefixes of Inductor's kernels."""
CLASSES = "class {class} | efficiency {efficiency:.1%} | ms per step {ms:.3f} | kernels per step {kernels:g}"
UNPLANNED = "not in the plan: "


def profile(run: RunSettings, ranks: Ranks) -> None:
    """Profile steps of a run to `profile.json`: each operation's caller (index in the list), name,
    input shapes, and own kernels with microseconds (on a CPU its self time)."""
    run.deepspeed.pop("flops_profiler", None)
    with join_ranks(run, ranks) as device, open_run_dir(run, ranks, device) as record:
        engine = setup_engine(run, ranks, setup_model(run, ranks, device), StepTimer(device))
        with setup_dataloader(run, ranks, engine) as loader:
            record.update_summary(engine.optimize_towers(loader, run.clap.model, run.clap.compile))
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
    found = [
        event
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CPU
    ]
    place: dict[int | None, int] = {id(event): number for number, event in enumerate(found)}
    events = []
    for each in found:
        kernels = (
            [("", each.self_cpu_time_total)]
            if on_cpu
            else [(own.name, own.duration) for own in each.kernels]
        )
        events.append((place.get(id(each.cpu_parent)), each.name, each.input_shapes, kernels))
    return events


def join(
    profiled: Any, planned: Iterable[tuple[Operation, float]], ideal_s: Callable[[Operation], float]
) -> dict[str, dict[str, float]]:
    """Return, by class of operations, the longest first, the share of the data sheet's rates that
    is reached, and seconds and kernels per step. Unplanned operations are listed by name without a
    share; Inductor's kernels are one class. `ideal_s`: seconds of an operation at the data sheet's
    rates."""
    known = defaultdict[Any, list[Operation]](list)
    ideal = defaultdict[str, float](float)
    for operation, times in planned:
        if op_class(operation) == FUSED:
            ideal[FUSED] += STEPS * times * ideal_s(operation)
        else:
            known[operation.name, operation.shapes].append(operation)
    owners: list[Any] = []
    took = defaultdict[str, float](float)
    calls = defaultdict[str, set[int]](set)
    for number, (parent, name, shapes, launched) in enumerate(profiled["events"]):
        key = name.replace("::", ".", 1), tuple(tuple(shape) for shape in shapes if shape)
        without_result = key[0], key[1][:-1]  # of an `out=`
        own = next(((known[each], number) for each in (key, without_result) if each in known), None)
        owners.append((parent is not None and owners[parent]) or own)  # callees belong to it
        for kernel, us in launched:
            plans, call = owners[-1] or ([], number)
            plans = (
                [] if kernel.startswith("Memcpy HtoD") else plans
            )  # of batches, beside the kernels
            of = op_class(plans[0]) if plans else UNPLANNED + name
            if not plans and ideal[FUSED] and kernel.startswith(INDUCTORS):
                of = FUSED
            if plans and call not in calls[of]:
                ideal[of] += sum(map(ideal_s, plans)) / len(plans)
            took[of] += us / 1e6
            calls[of].add(call)
    return {
        of: ({"efficiency": ideal[of] / spent_s} if ideal[of] else {})
        | {"seconds": spent_s / STEPS, "kernels": len(calls[of]) / STEPS}
        for of, spent_s in sorted(took.items(), key=lambda item: -item[1]) if spent_s
    }  # fmt: skip


def idle_text(trace: dict[str, Any]) -> str:
    """Return how long the device's busiest stream was idle per step, and between which kernels
    longest. From a Chrome trace."""
    streams = defaultdict[Any, list[dict[str, Any]]](list)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams[event["args"]["stream"]].append(event)
    busiest: list[dict[str, Any]] = max(streams.values(), key=len) if streams else []
    kernels = sorted(busiest, key=lambda event: float(event["ts"]))
    gaps = [
        (after["ts"] - before["ts"] - before["dur"], before, after)
        for before, after in pairwise(kernels)
    ]
    if not gaps:
        return "no kernels in the trace"
    total = sum(max(0.0, gap) for gap, *_ in gaps) / STEPS / 1000
    longest, before, after = max(gaps, key=lambda gap: float(gap[0]))
    between = " and ".join(f"`{each['name'][:60]}`" for each in (before, after))
    return f"Idle {total:.1f} ms per step; longest {longest / 1000:.1f} ms, between {between}."


def show_shares(folder: Path, gpu: Gpu | None, output: Path | None) -> None:
    """Show the shares of all profiles below a folder, each joined to its run's plan. UserError if
    there is none, or its device is unknown."""
    texts = list[str]()
    classes = dict[str, Any]()
    device = ""
    for path in sorted(folder.rglob("profile.json"), key=lambda path: path.stat().st_mtime):
        run = load_run(path.with_name("config.json"), 1)
        summary = read_json(path.with_name("summary.json"))
        device = summary["device_name"]
        is_compiled = "compiled" in summary
        if not (known := gpu or peak_for(device)) or not known.memory_tbytes_per_s:
            raise UserError(
                f"{path}: no known rates for {device!r}; pass --gpu with a GPU name of clap-ds plan"
            )
        kernels = {
            f"{part}_impl": chosen["kernel"] for part, chosen in summary.get("kernels", {}).items()
        }
        run.clap = run.clap.model_copy(update={"model": run.clap.model.model_copy(update=kernels)})
        fused = compiled_kernels(run, run.micro_batch) if is_compiled else []
        work = trace_step(run, run.micro_batch, cuda=summary["device_type"] == "cuda").work(fused)
        if not (found := join(read_json(path), work, partial(ideal_s, gpu=known))):
            raise UserError(f"{path}: no kernel times; check that torch.profiler can use CUPTI")
        rows = [
            {"class": name, "ms": 1000 * each["seconds"], **each} for name, each in found.items()
        ]
        texts += [f"## {path.parent}\n\n{table(CLASSES, rows)}"]
        if (traced := path.with_name("trace.json.gz")).exists():
            texts += [idle_text(json.loads(gzip.decompress(traced.read_bytes())))]
        # Use the compiled run for Inductor's kernels and the eager run, which has all others, for
        # the rest.
        classes |= {
            name: each
            for name, each in found.items()
            if name in EFFICIENCY and (name == FUSED) == is_compiled
        }
    if not texts:
        raise UserError(
            f"{folder}: no profile.json below it; create one with --deepspeed_config RUN"
        )
    text = "\n\n".join([f"# Shares of the data sheet's rates, {device}", *texts])
    show(output, text, {"device": device, "commit": commit(), "classes": classes})


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_config(parser, required=False)
    parser.add_argument(
        "--profiles", type=Path, metavar="FOLDER", help="folder of profiles to join to their plans"
    )
    parser.add_argument(
        "--gpu", type=gpu_named, help="GPU name of clap-ds plan, if the profile's device is unknown"
    )
    options = parser.parse_args(argv)
    if options.config:
        run_command(lambda ranks: profile(load_run(options.config, 1, options.set), ranks))
    if options.profiles:
        show_shares(options.profiles, options.gpu, options.output)


if __name__ == "__main__":
    run_alone(main)
