"""Command: the plan's roofline held against training rates that others measured on GPUs and published.

    python -m benchmarks.plan_validation [--output FILE.md]

Each row of `published_rates.csv` is a published run. Its training step is recorded on fake tensors, as plans record this
engine's: a model of `transformers` with the published sizes, precision, kind of attention and optimizer. No row has a factor
of its own.

Where a recorded step differs from the published code: query, key and value are three products where timm's and GPT-2's code has
one; what NVIDIA's code has as one kernel (LAMB, apex's layer norm) is torch's; Swin and HTSAT pad images by nothing, in a copy;
causal attention counts what it leaves out; gradients travel for free.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import make_parser, show, table
from benchmarks.sides import MasterAdamW, softmax_loss
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset
from clap_ds.flop_count.peaks import gpu_named
from clap_ds.flop_count.published_model import ConvolutionMel
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.roofline import CASES, fused, rates_of, seconds_by_part
from clap_ds.planning.trace import Operation, trace
from clap_ds.weights.hf_config import config_to_transformers

import transformers  # isort: skip  (after torchaudio_compat)

PUBLISHED = Path(__file__).with_name("published_rates.csv")
"""`class`: of `transformers`; `sizes`: those that aren't the class's own. Donut's Swin has the attention of the published code,
which `SwinModel` no longer has. `size`: pixels a side, or tokens, of which the loss is of `predicted`."""
COLUMNS = (
    "model {model} | GPU {device} | batch {batch} | size {size} | precision {precision} | attention {attention}"
    " | compiled {compiled} | published {rate:,.1f} {unit} | predicted {predicted_rate[middle]:,.1f}"
    " | interval {predicted_rate[low]:,.1f}–{predicted_rate[high]:,.1f} | ratio {ratio:.2f} | source {code}, {year}: {source}"
)
PARSED: dict[str, Any] = dict.fromkeys(("batch", "size", "predicted", "accumulation", "year"), int)
PARSED |= {"rate": float} | dict.fromkeys(("sizes", "optimizer"), ast.literal_eval)


def published_rows() -> list[dict[str, Any]]:
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [{name: PARSED.get(name, str)(text) for name, text in row.items()} for row in csv.DictReader(file)]


def build(row: dict[str, Any]) -> Any:
    """The row's model; CLAP with LAION's front end as its `mel`."""
    model_class, attention = getattr(transformers, row["class"]), row["attention"]
    if row["class"] != "ClapModel":
        return model_class(model_class.config_class(**row["sizes"], attn_implementation=attention))
    config: Any = config_to_transformers(load_preset(row["model"]))
    config.audio_config.update(row["sizes"])
    model = model_class(config)
    model.text_model.config._attn_implementation = attention
    model.mel = ConvolutionMel(load_preset(row["model"]).audio)
    return model


def loss_of(model: Any, row: dict[str, Any]) -> Tensor:
    """Forward pass of a micro-batch."""
    labels, ids = (torch.zeros(shape, dtype=torch.long) for shape in (row["batch"], (row["batch"], row["size"])))
    if row["class"] == "ClapModel":
        clips = torch.empty(row["batch"], load_preset(row["model"]).audio.num_samples)
        found = model(input_features=model.mel(clips)[:, None], input_ids=ids)
        return softmax_loss(found.audio_embeds, found.text_embeds, model.logit_scale_a.exp())
    if row["unit"] == "images/s":
        return model(torch.empty(row["batch"], 3, row["size"], row["size"]), labels=labels).loss
    mask = torch.ones_like(ids) if row["class"].startswith("Bert") else None
    if not row["predicted"]:
        return model(ids, attention_mask=mask, start_positions=labels, end_positions=labels).loss
    hidden = model.base_model(ids, attention_mask=mask)[0][:, : row["predicted"]]
    logits = getattr(model, "cls", model.get_output_embeddings())(hidden).flatten(0, 1)
    return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long))


def step_of(row: dict[str, Any]) -> list[tuple[Operation, float]]:
    """Operations of the row's second step, each with how often the step does it."""
    is_amp, dtype = "amp" in row["precision"], torch.float16 if "fp16" in row["precision"] else torch.bfloat16
    with torch.device("meta"):
        model = build(row).train().to(None if is_amp else dtype)
    with (fakes := FakeTensorMode(allow_non_fake_inputs=True)):
        model.to_empty(device="cpu").tie_weights()  # which moving them undid
    # AdamW divides by the step's number, which of a fake tensor is 0.
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
    """The row with the rates that are predicted for these operations, and the middle one's ratio to the published one."""
    gpu, num_samples = gpu_named(row["device"]), row["batch"] * row["accumulation"]
    predicted = {case: num_samples / seconds_by_part(operations, rates_of(gpu, case))["step"] for case in CASES}
    return {**row, "predicted_rate": predicted, "ratio": predicted["middle"] / row["rate"]}


def render(rows: Sequence[dict[str, Any]]) -> str:
    covered = sum(row["predicted_rate"]["low"] <= row["rate"] <= row["predicted_rate"]["high"] for row in rows)
    return (
        f"# The plan beside published training rates\n\n{table(COLUMNS, rows)}\n\nRatio: predicted over published. Median"
        f" **{median(row['ratio'] for row in rows):.2f}** of {len(rows)} rows; {covered} rates are in their interval."
    )


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser("plan_validation", __doc__).parse_args(argv)
    rows = [compared(row, step_of(row)) for row in published_rows()]
    show(arguments.output, render(rows), rows)


if __name__ == "__main__":
    run_alone(main)
