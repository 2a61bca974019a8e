"""Compare the speed of this project's training step with other implementations, interleaved in one
process.

    python -m benchmarks.compare_baselines [--against loops transformers] [--micro_batch 8] [--precision bf16 fp32] [--rounds 8]

All sides have the same weights and batch, and each round times one step of each. Ours is the step
of `clap_ds/bench.py`.

- The training loops of open_clip and LAION-CLAP run the preset under autocast with torch's default
  AdamW. They are timed with SpecAugment as published (theirs clip by clip, ours batched), and
  without it on all sides.
- `transformers`: its towers with the preset's heads, under autocast, and with cast weights and fp32
  master weights.

With `--text packed`, this project packs shorter captions (`--caption_lengths`). The loops pad them
to the context length, as open_clip and LAION-CLAP do. `transformers` pads to the batch's longest,
as its processor does with `padding=True`.

The forward pass includes the log-mel front end: this project's, in LAION-CLAP's loop its own.
Dropout and stochastic depth are off. Without SpecAugment, losses must agree.
"""

from __future__ import annotations

import argparse
import itertools
from statistics import median
from typing import Any

import torch

from benchmarks.baselines import EngineSide, Side, make_batch
from benchmarks.common import make_parser, show, table
from clap_ds.config.model import load_preset
from clap_ds.cpu_kernels.patch_model import report
from clap_ds.distributed.init import Ranks, initialize
from clap_ds.metrics.intervals import median_interval
from clap_ds.run_records.environment import device_name
from clap_ds.utils.errors import run_alone

TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""Largest relative difference of a loss from ours."""
KINDS = {"loops": ("open_clip", "LAION-CLAP"), "transformers": ("transformers",)}
WARM_UP = 2
PARTS = ("forward", "backward", "optimizer", "step")
SIDES = (
    f"ms {{side}}{''.join(f' | {part} {{{part}:.1f}}' for part in PARTS)} | first loss {{loss:.5f}}"
    " | ours, × its speed {speed[median]:.2f} | interval {speed[low]:.2f}–{speed[high]:.2f} ({speed[coverage]:.0%})"
)


def compare(
    arguments: argparse.Namespace,
    against: str,
    precision: str,
    device: torch.device,
    *,
    spec_augment: bool,
) -> dict[str, Any]:
    """Time every side of one comparison and return a JSON-serializable result."""
    config = load_preset(arguments.preset)
    lows = ["autocast"] if against == "loops" else ["autocast", "cast"]
    batch = make_batch(arguments, config, device)
    ours = EngineSide(arguments, precision, batch, spec_augment=spec_augment)
    sides: dict[str, Side | EngineSide] = {"ours": ours}
    for kind, low in itertools.product(KINDS[against], lows if precision == "bf16" else ["none"]):
        sides[f"{kind}, {low}"] = Side(
            config, ours.weights, kind, low, device, spec_augment=spec_augment
        )
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(WARM_UP + arguments.rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            times[name].append(sides[name].step(batch))
    rows: list[dict[str, Any]] = []
    for name, steps in times.items():
        speeds = [its["step"] / own["step"] for its, own in zip(steps, times["ours"], strict=True)][
            WARM_UP:
        ]
        row = {part: 1000 * median(step[part] for step in steps[WARM_UP:]) for part in PARTS}
        rows.append(
            {"side": name, "loss": sides[name].losses[0], "speed": median_interval(speeds), **row}
        )
    difference = max(abs(row["loss"] / rows[0]["loss"] - 1) for row in rows)
    return {
        "precision": precision, "preset": arguments.preset, "spec_augment": spec_augment, "sides": rows,
        "loss_difference": difference, "loss_agrees": spec_augment or difference < TOLERANCE[precision],
    }  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """Format the result of one comparison as Markdown."""
    agreement = "agree" if result["loss_agrees"] else "DISAGREE"
    last = "each side draws its own masks" if result["spec_augment"] else agreement
    masks = "as published, with SpecAugment" if result["spec_augment"] else "without SpecAugment"
    return (
        f"## {result['preset']}, {result['precision']}, {masks}\n\n{table(SIDES, result['sides'])}\n\nLosses differ by up to"
        f" {result['loss_difference']:.1e}: {last}."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the comparisons and return 1 if losses disagree."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--against",
        nargs="+",
        choices=KINDS,
        default=[*KINDS],
        help="baselines to compare with (default: all)",
    )
    add("--preset", default="htsat_tiny_roberta_base", help="model (default: HTSAT-tiny's)")
    add("--context_length", type=int, default=77, help="tokens per caption (default: 77)")
    lengths = "LOW and HIGH of uniform caption lengths in tokens (default: --context_length)"
    add("--caption_lengths", type=int, nargs=2, metavar="N", help=lengths)
    add(
        "--text",
        choices=("padded", "packed"),
        default="padded",
        help="our text tower's batching (default: padded)",
    )
    add("--micro_batch", type=int, default=8, help="clips per step (default: 8)")
    add("--rounds", type=int, default=8, help="timed steps of each side (default: 8)")
    add(
        "--precision",
        nargs="+",
        choices=("bf16", "fp32"),
        default=["bf16", "fp32"],
        help="to time (default: both)",
    )
    arguments = parser.parse_args(argv)
    device = initialize(Ranks.from_environment())
    text = (
        f"# {load_preset(arguments.preset).name} on {device_name(device)}\n\n{torch.get_num_threads()} threads, micro-batch"
        f" {arguments.micro_batch}, {arguments.context_length} text tokens, {arguments.text}; torch {torch.__version__}."
    )
    on_cpu = f"CPU kernels in bf16: ours {report('auto')}, the others' oneDNN."
    text += f" {on_cpu if device.type == 'cpu' else 'Ours uses eager torch operations, unlike a default run.'}"
    results = [
        compare(arguments, against, precision, device, spec_augment=spec_augment)
        for precision in arguments.precision
        for against in arguments.against
        for spec_augment in ((True, False) if against == "loops" else (False,))
    ]
    show(arguments.output, "\n\n".join([text, *map(render, results)]), results)
    return 0 if all(result["loss_agrees"] for result in results) else 1


if __name__ == "__main__":
    run_alone(main)
