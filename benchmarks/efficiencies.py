"""Command: which share of its data sheet's rates a device reaches, by class of the plan's operations, from profiled steps.

    python -m benchmarks.efficiencies --deepspeed_config RUN                   # two steps under torch.profiler, one rank
    python -m benchmarks.efficiencies FOLDER --output results/h200/efficiencies.md     # of every profile.json below it

What is profiled stays in the run directory, so that the second command can be given again as plans change. It joins what the
profiler saw to the operations of the same run's plan, by their names and inputs' shapes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser, show, table
from clap_ds.bench import measure_run
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.files import read_json
from clap_ds.config.places import commit
from clap_ds.config.settings import load_run
from clap_ds.flop_count.peaks import Gpu, gpu_named, peak_for
from clap_ds.ranks.distributed import run_command

WARM_UP, STEPS = 5, 2
LEAST_SHARE = 0.001
"""Of the time, that an operation takes to be listed."""
FUSED = "fused kernel"
INDUCTORS = ("triton_poi", "triton_red", "triton_per", "triton_for")
"""The plan's class of Inductor's kernels, and what their names begin with."""
COLUMNS = (
    "operation {name} | inputs {shapes} | kernel {kernel} | a step {calls:g} | ms a step {ms:.3f} | share {share:.1%}"
    " | by the data sheet {ideal_ms:.3f} | efficiency {efficiency:.1%} | class {class}"
)
CLASSES = "class {class} | efficiency {efficiency:.1%} | ms a step {ms:.3f} | kernels a step {kernels:g}"


def profile(session: Any) -> None:
    """Profile steps of a session and leave them as `profile.json`: of each operation its caller's place in the list, its name,
    its inputs' shapes, and its own kernels with their microseconds (on a CPU its own time)."""
    import torch

    from clap_ds.record.clock import PhaseTimer

    timer, on_cpu = PhaseTimer(session.device, instrumented=False), session.device.type == "cpu"
    for _ in range(WARM_UP):
        session.engine.step(session.batches, timer)
    with torch.profiler.profile(record_shapes=True) as profiler:
        for _ in range(STEPS):
            session.engine.step(session.batches, timer)
        float(session.engine.is_skipped)  # waits for the device
    found = [event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CPU]
    place: dict[int | None, int] = {id(event): number for number, event in enumerate(found)}
    events = []
    for each in found:
        kernels = [("", each.self_cpu_time_total)] if on_cpu else [(own.name, own.duration) for own in each.kernels]
        events.append((place.get(id(each.cpu_parent)), each.name, each.input_shapes, kernels))
    left = {"steps": STEPS, "events": events, "ceilings": ceilings(session.device)}
    (session.record.path / "profile.json").write_text(json.dumps(left))


def ceilings(device: Any) -> dict[str, float]:
    """By name: TFLOPS of a large product in bf16, and GB/s of copies."""
    import torch
    from torch.utils.benchmark import Timer

    from clap_ds.measuring.matmul_ceiling import measure_matmul_tflops

    on_gpu = device.type == "cuda"
    here = torch.zeros(2**28 if on_gpu else 2**22, device=device)
    names = {"here": here, "there": torch.zeros_like(here), "host": torch.zeros(here.shape, pin_memory=on_gpu)}
    found = {"TFLOPS of a product": measure_matmul_tflops(device)}
    for what, times, source in (("a copy, read and written", 2, "here"), ("a copy from the host", 1, "host")):
        timer = Timer(f"there.copy_({source})", globals=names)
        found[f"GB/s of {what}"] = times * here.nbytes / 1e9 / timer.blocked_autorange(min_run_time=0.5).median
    return found


def join(profiled: Any, planned: Iterable[tuple[Any, float]], ideal_s: Callable[[Any], float]) -> list[dict[str, Any]]:
    """A row for each kind of operation, the longest first, with `class`, `ideal_ms` and `efficiency` where the plan has it.
    What an operation of the plan calls is its own.

    Args:
        profiled: what `profile` left.
        planned: the plan's operations and how often a step does each; Inductor's kernels are joined all together.
        ideal_s: of one of them at the data sheet's rates.
    """
    from clap_ds.planning.efficiency import class_of

    known, inductors_s = defaultdict(list), 0.0
    for operation, times in planned:
        if operation.launches and class_of(operation) == FUSED:
            inductors_s += times * ideal_s(operation)
        elif operation.launches:
            known[operation.name, operation.shapes].append(operation)
    owners: list[Any] = []
    calls, kernels = defaultdict[Any, set[int]](set), defaultdict[Any, Counter[str]](Counter)
    for number, (parent, name, shapes, launched) in enumerate(profiled["events"]):
        key = name.replace("::", ".", 1), tuple(tuple(shape) for shape in shapes if shape)
        without_result = key[0], key[1][:-1]  # that an `out=` names
        own = next(((each, number) for each in (key, without_result) if each in known), None)
        owners.append((parent is not None and owners[parent]) or own)
        for kernel, us in launched:
            other = ("fused", ()) if inductors_s and kernel.startswith(INDUCTORS) else key
            place, call = owners[-1] or (other, number)
            calls[place].add(call)
            kernels[place][kernel] += us
    rows, steps = [], profiled["steps"]
    for (name, shapes), took in sorted(kernels.items(), key=lambda item: -item[1].total()):
        times, ms = len(calls[name, shapes]) / steps, took.total() / 1000 / steps
        row = {"name": name, "shapes": " ".join("×".join(map(str, shape)) for shape in shapes)}
        row |= {"calls": times, "ms": ms, "kernel": took.most_common(1)[0][0].partition("(")[0]}
        if ms and (plans := known.get((name, shapes), [])):
            row |= {"class": class_of(plans[0]), "ideal_ms": 1000 * times * sum(map(ideal_s, plans)) / len(plans)}
        elif ms and name == "fused":
            row |= {"class": FUSED, "ideal_ms": 1000 * inductors_s}
        rows.append(row | ({"efficiency": row["ideal_ms"] / ms} if "class" in row else {}))
    return rows


def classes_of(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By class: the share reached, and seconds and kernels a step."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if "class" in row:
            found[row["class"]].update(ideal=row["ideal_ms"], ms=row["ms"], kernels=row["calls"])
    return {
        name: {"efficiency": each["ideal"] / each["ms"], "seconds": each["ms"] / 1000, "kernels": each["kernels"]}
        for name, each in found.items()
    }


def read(path: Path, gpu: Gpu | None) -> tuple[str, bool, dict[str, float], list[dict[str, Any]]]:
    """A profile's device, whether towers were compiled, ceilings, and rows joined to the plan of the run it lies with."""
    from clap_ds.planning.roofline import fused, rates_of
    from clap_ds.planning.step import trace_step

    run, summary = load_run(path.with_name("config.json"), 1), read_json(path.with_name("summary.json"))
    device = summary["device_name"]
    if not (gpu := gpu or peak_for(device)) or not gpu.memory_tbytes_per_s:
        raise UserError(f"{path}: no rates for {device!r} are known; give --gpu with the name clap-plan has for it")
    kernels = {field: chosen["kernel"] for field, chosen in summary.get("kernels", {}).items()}
    run.clap = run.clap.model_copy(update={"model": run.clap.model.model_copy(update=kernels)})
    step = trace_step(run, run.micro_batch, cuda=summary["device_type"] == "cuda")
    planned = [each for each in step.recorded.operations if not each.is_collective]
    is_compiled, profiled = "compiled" in summary, read_json(path)
    work = [(each, step.times(each)) for each in (fused(planned) if is_compiled else planned)]
    return device, is_compiled, profiled["ceilings"], join(profiled, work, rates_of(gpu, "middle").ideal_s)


def main(argv: list[str] | None = None) -> None:
    """A UserError where there is no profile, or nothing is known of its device."""
    parser = make_parser("efficiencies", __doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="with profiles below it; default: runs"
    )
    parser.add_argument("--deepspeed_config", type=Path, metavar="RUN", help="profile this run")
    parser.add_argument("--gpu", type=gpu_named, help="as clap-plan names it, where the profile's device isn't known")
    options = parser.parse_args(argv)
    if options.deepspeed_config:
        run_command(lambda ranks: measure_run(load_run(options.deepspeed_config, 1), ranks, profile))
    texts, classes, device = list[str](), dict[str, Any](), ""
    for path in sorted(options.folder.rglob("profile.json"), key=lambda path: path.stat().st_mtime):
        device, is_compiled, ceilings_there, rows = read(path, options.gpu)
        if not (total := sum(row["ms"] for row in rows)):
            raise UserError(f"{path}: no kernel's time is in it; expected CUPTI to let torch.profiler see the GPU's")
        joined = sum(row["ms"] for row in rows if "class" in row) / total
        listed = [{**row, "share": row["ms"] / total} for row in rows if row["ms"] >= LEAST_SHARE * total]
        reached = "; ".join(f"{rate:,.1f} {of}" for of, rate in ceilings_there.items())
        took = f"{total:.1f} ms a step, {joined:.1%} joined to the plan. This device by itself: {reached}."
        texts += [f"## {path.parent}", took, table(COLUMNS, listed)]
        # Inductor's kernels are told by the compiled run, the others by the eager one, which has all of them.
        classes |= {name: each for name, each in classes_of(rows).items() if (name == FUSED) == is_compiled}
    if not texts:
        raise UserError(f"{options.folder}: no profile.json below it; --deepspeed_config RUN makes one")
    shown = [{"class": name, "ms": 1000 * each["seconds"], **each} for name, each in classes.items()]
    text = "\n\n".join([f"# Shares of the data sheet's rates, {device}", table(CLASSES, shown), *texts])
    made_by = " ".join(["python", *sys.orig_argv[1:]])
    show(options.output, text, {"device": device, "made_by": made_by, "commit": commit(), "classes": classes})


if __name__ == "__main__":
    run_alone(main)
