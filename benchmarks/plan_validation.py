"""Compare a plan's roofline with published training throughput, or with profiled steps of this engine.

    python -m benchmarks.plan_validation [--output FILE.md]                    # compare with published rates
    python -m benchmarks.plan_validation --deepspeed_config RUN                # profile two steps on one rank
    python -m benchmarks.plan_validation --profiles FOLDER --output results/h200/efficiencies.md

Each row of `published_rates.csv` is a published run. Its training step is traced on fake tensors: a `transformers` model with
the published sizes, precision, attention and optimizer; for LAION with its SpecAugment loop. It differs from the published
code: query, key and value are three products, not one as in timm and GPT-2; NVIDIA's fused kernels (LAMB, apex's layer norm)
are torch's; Swin and HTSAT copy images to pad them by zero pixels; causal attention counts masked work; sending gradients is
free.

A profile is saved as `profile.json` in the run directory. It is joined to the operations of the run's plan by name and input
shapes. The result is each class of operations' share of the data sheet's rates.
"""

from __future__ import annotations

import ast
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.baselines import LoopModel, MasterAdamW, softmax_loss
from benchmarks.common import make_parser, show, table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.files import read_json
from clap_ds.config.model import load_preset
from clap_ds.config.paths import commit
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import Ranks, run_command
from clap_ds.engine.open_run import open_run_dir
from clap_ds.flop_count.device_specs import Gpu, gpu_named, peak_for
from clap_ds.flop_count.published_model import ConvolutionMel
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.roofline import CASES, fused, rates_of, seconds_by_part
from clap_ds.planning.roofline_shares import FUSED, TABLE, class_of
from clap_ds.planning.step import trace_step
from clap_ds.planning.tracing import Operation, trace
from clap_ds.run_parts import engine_of, joined_ranks, loader_of, model_of
from clap_ds.run_records.timers import StepTimer
from clap_ds.weights.hf_config import config_to_transformers

import transformers  # isort: skip  (after torchaudio_compat)

PUBLISHED = Path(__file__).with_name("published_rates.csv")
"""`class`: of `transformers`; `sizes`: those that differ from its defaults. Donut's Swin has the published code's attention,
which `SwinModel` no longer has. `size`: pixels per side, or tokens; the loss covers `predicted` of them."""
RATES = (
    "model {model} | GPU {device} | batch {batch} | size {size} | precision {precision} | attention {attention}"
    " | compiled {compiled} | published {rate:,.1f} {unit} | predicted {predicted_rate[middle]:,.1f}"
    " | interval {predicted_rate[low]:,.1f}–{predicted_rate[high]:,.1f} | ratio {ratio:.2f} | source {code}, {year}: {source}"
)
PARSED: dict[str, Any] = dict.fromkeys(("batch", "size", "predicted", "accumulation", "year"), int)
PARSED |= {"rate": float} | dict.fromkeys(("sizes", "optimizer"), ast.literal_eval)
WARM_UP, STEPS = 5, 2
INDUCTORS = ("triton_poi", "triton_red", "triton_per", "triton_for")
"""Name prefixes of Inductor's kernels."""
CLASSES = "class {class} | efficiency {efficiency:.1%} | ms per step {ms:.3f} | kernels per step {kernels:g}"
UNPLANNED = "not in the plan: "


def published_rows() -> list[dict[str, Any]]:
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [{name: PARSED.get(name, str)(text) for name, text in row.items()} for row in csv.DictReader(file)]


def build(row: dict[str, Any]) -> Any:
    """Build the row's model. CLAP has LAION's front end as its `mel`, and its SpecAugment."""
    model_class, attention = getattr(transformers, row["class"]), row["attention"]
    if row["class"] != "ClapModel":
        return model_class(model_class.config_class(**row["sizes"], attn_implementation=attention))
    preset = load_preset(row["model"])
    config: Any = config_to_transformers(preset)
    config.audio_config.update(row["sizes"])
    model = LoopModel(preset, config, spec_augment=True)
    model.text_model.config._attn_implementation = attention
    model.mel = ConvolutionMel(preset.audio)
    return model


def loss_of(model: Any, row: dict[str, Any]) -> Tensor:
    """Run the forward pass of a micro-batch and return the loss."""
    labels, ids = (torch.zeros(shape, dtype=torch.long) for shape in (row["batch"], (row["batch"], row["size"])))
    if row["class"] == "ClapModel":
        clips = torch.empty(row["batch"], load_preset(row["model"]).audio.num_samples)
        return softmax_loss(*model(model.mel(clips)[:, None], ids, None))
    if row["unit"] == "images/s":
        return model(torch.empty(row["batch"], 3, row["size"], row["size"]), labels=labels).loss
    mask = torch.ones_like(ids) if row["class"].startswith("Bert") else None
    if not row["predicted"]:
        return model(ids, attention_mask=mask, start_positions=labels, end_positions=labels).loss
    hidden = model.base_model(ids, attention_mask=mask)[0][:, : row["predicted"]]
    logits = getattr(model, "cls", model.get_output_embeddings())(hidden).flatten(0, 1)
    return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long))


def step_of(row: dict[str, Any]) -> list[tuple[Operation, float]]:
    """Trace the row's second step and return its operations with their counts per step."""
    is_amp, dtype = "amp" in row["precision"], torch.float16 if "fp16" in row["precision"] else torch.bfloat16
    with torch.device("meta"):
        model = build(row).train().to(None if is_amp else dtype)
    with (fakes := FakeTensorMode(allow_non_fake_inputs=True)):
        model.to_empty(device="cpu")
        if isinstance(model, transformers.PreTrainedModel):
            model.tie_weights()  # to_empty untied them
    # AdamW divides by the step number, which is 0 for a fake tensor.
    step_number = mock.patch("torch.optim.adam._get_value", return_value=1.0)
    with like_cuda(), fakes, step_number, trace() as recorded:
        name, options = row["optimizer"]
        optimizer = {"MasterAdamW": MasterAdamW, **vars(torch.optim)}[name]([*model.parameters()], **options)
        for _ in range(2):
            recorded.restart()
            with recorded.part("model"):
                with torch.autocast("cpu", dtype, enabled=is_amp):
                    loss = loss_of(model, row)
                loss.backward()
            with recorded.part("optimizer"):
                optimizer.step()
                model.zero_grad()
    operations = fused(recorded.operations, ("model",)) if row["compiled"] == "yes" else recorded.operations
    return [(each, 1 if each.part == "optimizer" else row["accumulation"]) for each in operations]


def compared(row: dict[str, Any], operations: Sequence[tuple[Operation, float]]) -> dict[str, Any]:
    """Add to a row the predicted rates and the ratio of the middle one to the published one. For LAION's rows, add the time per
    sample, and that of copying the masked spectrograms' gradient."""
    gpu, num_samples = gpu_named(row["device"]), row["batch"] * row["accumulation"]
    predicted = {case: num_samples / seconds_by_part(operations, rates_of(gpu, case))["step"] for case in CASES}
    found = {**row, "predicted_rate": predicted, "ratio": predicted["middle"] / row["rate"]}
    if row["class"] == "ClapModel":
        frames, bins = load_preset(row["model"]).audio.feature_shape
        written = 4 * row["batch"] * frames * bins
        copies = [
            each for each, _ in operations
            if each.backward and each.name == "aten.copy_" and [size for _, size in each.written] == [written]
        ]  # fmt: skip
        copies_s = sum(map(rates_of(gpu, "middle").seconds, copies))
        found |= {
            "copies": len(copies),
            "copies_gb_a_sample": sum(each.bytes_moved for each in copies) / num_samples / 1e9,
        }
        found |= {"published_ms": 1000 / row["rate"], "predicted_ms": 1000 / predicted["middle"]}
        found |= {"copies_ms": 1000 * copies_s / num_samples}
    return found


def render(rows: Sequence[dict[str, Any]]) -> str:
    covered = sum(row["predicted_rate"]["low"] <= row["rate"] <= row["predicted_rate"]["high"] for row in rows)
    return "\n\n".join([
        f"# Predicted and published training throughput\n\n{table(RATES, rows)}",
        f"Ratio: predicted over published. Median **{median(row['ratio'] for row in rows):.2f}** of {len(rows)} rows;"
        f" {covered} published rates are within the predicted interval.",
        *(
            "{model}: published {published_ms:.2f} ms per sample, predicted {predicted_ms:.2f}, {unexplained:.2f} unexplained."
            " {copies_ms:.2f} ms of the prediction are {copies:,} copies of the batch's gradient in SpecAugment's loop,"
            " {copies_gb_a_sample:.2f} GB per sample; without them {without:.2f} would be unexplained.".format(
                **row, unexplained=(gap := row["published_ms"] - row["predicted_ms"]), without=gap + row["copies_ms"]
            )
            for row in rows if "copies" in row
        ),
    ])  # fmt: skip


def profile(run: RunSettings, ranks: Ranks) -> None:
    """Profile steps of a run to `profile.json`: each operation's caller (index in the list), name, input shapes, and own
    kernels with microseconds (on a CPU its self time)."""
    run.deepspeed.pop("flops_profiler", None)
    with joined_ranks(run, ranks) as device, open_run_dir(run, ranks, device) as record:
        engine = engine_of(run, ranks, model_of(run, ranks, device), StepTimer(device))
        with loader_of(run, ranks, engine) as loader:
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
    found = [event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CPU]
    place: dict[int | None, int] = {id(event): number for number, event in enumerate(found)}
    events = []
    for each in found:
        kernels = [("", each.self_cpu_time_total)] if on_cpu else [(own.name, own.duration) for own in each.kernels]
        events.append((place.get(id(each.cpu_parent)), each.name, each.input_shapes, kernels))
    return events


def join(
    profiled: Any, planned: Iterable[tuple[Operation, float]], ideal_s: Callable[[Operation], float]
) -> dict[str, dict[str, float]]:
    """Return, by class of operations, the longest first, the share of the data sheet's rates that is reached, and seconds and
    kernels per step. Unplanned operations are listed by name without a share; Inductor's kernels are one class. `ideal_s`:
    seconds of an operation at the data sheet's rates."""
    known, ideal = defaultdict[Any, list[Operation]](list), defaultdict[str, float](float)
    for operation, times in planned:
        if operation.launches and class_of(operation) == FUSED:
            ideal[FUSED] += STEPS * times * ideal_s(operation)
        elif operation.launches:
            known[operation.name, operation.shapes].append(operation)
    owners: list[Any] = []
    took, calls = defaultdict[str, float](float), defaultdict[str, set[int]](set)
    for number, (parent, name, shapes, launched) in enumerate(profiled["events"]):
        key = name.replace("::", ".", 1), tuple(tuple(shape) for shape in shapes if shape)
        without_result = key[0], key[1][:-1]  # of an `out=`
        own = next(((known[each], number) for each in (key, without_result) if each in known), None)
        owners.append((parent is not None and owners[parent]) or own)  # callees belong to it
        for kernel, us in launched:
            plans, call = owners[-1] or ([], number)
            of = class_of(plans[0]) if plans else UNPLANNED + name
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


def show_shares(folder: Path, gpu: Gpu | None, output: Path | None) -> None:
    """Show the shares of all profiles below a folder, each joined to its run's plan. UserError if there is none, or its device
    is unknown."""
    texts, classes, device = list[str](), dict[str, Any](), ""
    for path in sorted(folder.rglob("profile.json"), key=lambda path: path.stat().st_mtime):
        run, summary = load_run(path.with_name("config.json"), 1), read_json(path.with_name("summary.json"))
        device, is_compiled = summary["device_name"], "compiled" in summary
        if not (known := gpu or peak_for(device)) or not known.memory_tbytes_per_s:
            raise UserError(f"{path}: no known rates for {device!r}; pass --gpu with a GPU name of clap-plan")
        kernels = {f"{part}_impl": chosen["kernel"] for part, chosen in summary.get("kernels", {}).items()}
        run.clap = run.clap.model_copy(update={"model": run.clap.model.model_copy(update=kernels)})
        work = trace_step(run, run.micro_batch, cuda=summary["device_type"] == "cuda").work(compiled=is_compiled)
        if not (found := join(read_json(path), work, rates_of(known, "middle").ideal_s)):
            raise UserError(f"{path}: no kernel times; check that torch.profiler can use CUPTI")
        rows = [{"class": name, "ms": 1000 * each["seconds"], **each} for name, each in found.items()]
        texts += [f"## {path.parent}\n\n{table(CLASSES, rows)}"]
        # Use the compiled run for Inductor's kernels and the eager run, which has all others, for the rest.
        classes |= {name: each for name, each in found.items() if name in TABLE and (name == FUSED) == is_compiled}
    if not texts:
        raise UserError(f"{folder}: no profile.json below it; create one with --deepspeed_config RUN")
    text = "\n\n".join([f"# Shares of the data sheet's rates, {device}", *texts])
    show(output, text, {"device": device, "commit": commit(), "classes": classes})


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("plan_validation", __doc__)
    parser.add_argument("--deepspeed_config", type=Path, metavar="RUN", help="run's JSON to profile")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="folder of profiles to join to their plans")
    parser.add_argument("--gpu", type=gpu_named, help="GPU name of clap-plan, if the profile's device is unknown")
    options = parser.parse_args(argv)
    if options.deepspeed_config:
        run_command(lambda ranks: profile(load_run(options.deepspeed_config, 1), ranks))
    if options.profiles:
        show_shares(options.profiles, options.gpu, options.output)
    if not (options.deepspeed_config or options.profiles):
        rows = [compared(row, step_of(row)) for row in published_rows()]
        show(options.output, render(rows), rows)


if __name__ == "__main__":
    run_alone(main)
