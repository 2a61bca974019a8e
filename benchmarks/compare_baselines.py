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
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.process_group import initialize
from clap_ds.metrics.intervals import median_interval
from clap_ds.run_records.environment import device_name
from clap_ds.utils.errors import run_alone

# Largest relative difference of a loss from ours.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
KINDS = {"loops": ("open_clip", "LAION-CLAP"), "transformers": ("transformers",)}
# Rounds.
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
    # The loops have no other mode.
    modes = ["autocast"] if against == "loops" else ["autocast", "cast"]
    if precision == "fp32":
        modes = ["none"]
    batch = make_batch(arguments, config, device)
    ours = EngineSide(arguments, precision, batch, spec_augment=spec_augment)
    sides: dict[str, Side | EngineSide] = {"ours": ours}
    for kind, mode in itertools.product(KINDS[against], modes):
        side = Side(config, ours.weights, kind, mode, device, spec_augment=spec_augment)
        sides[f"{kind}, {mode}"] = side
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(WARM_UP + arguments.rounds):
        # Every other round in reverse order, so that no side always runs first.
        for name in list(sides)[:: -1 if number % 2 else 1]:
            step_s = sides[name].step(batch)
            if number >= WARM_UP:
                times[name].append(step_s)
    rows: list[dict[str, Any]] = []
    for name, steps in times.items():
        ratios = [
            step["step"] / our_step["step"]
            for step, our_step in zip(steps, times["ours"], strict=True)
        ]
        row = {part: 1000 * median(step[part] for step in steps) for part in PARTS}
        # Later ones follow from different optimizers.
        loss = sides[name].losses[0]
        rows.append({"side": name, "loss": loss, "speed": median_interval(ratios), **row})
    # Ours is the first row.
    difference = max(abs(row["loss"] / rows[0]["loss"] - 1) for row in rows)
    return {
        "precision": precision,
        "preset": arguments.preset,
        "spec_augment": spec_augment,
        "sides": rows,
        "loss_difference": difference,
        # With SpecAugment, each side draws its own masks.
        "loss_agrees": spec_augment or difference < TOLERANCE[precision],
    }


def render(result: dict[str, Any]) -> str:
    """Format the result of one comparison as Markdown."""
    if result["spec_augment"]:
        masks = "as published, with SpecAugment"
        agreement = "each side draws its own masks"
    else:
        masks = "without SpecAugment"
        agreement = "agree" if result["loss_agrees"] else "DISAGREE"
    title = f"## {result['preset']}, {result['precision']}, {masks}"
    losses = f"Losses differ by up to {result['loss_difference']:.1e}: {agreement}."
    return f"{title}\n\n{table(SIDES, result['sides'])}\n\n{losses}"


def main(argv: list[str] | None = None) -> int:
    """Run the comparisons and return 1 if losses disagree."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    against = "baselines to compare with (default: all)"
    add("--against", nargs="+", choices=KINDS, default=[*KINDS], help=against)
    add("--preset", default="htsat_tiny_roberta_base", help="model (default: HTSAT-tiny's)")
    add("--context_length", type=int, default=77, help="tokens per caption (default: 77)")
    lengths = "LOW and HIGH of uniform caption lengths in tokens (default: --context_length)"
    add("--caption_lengths", type=int, nargs=2, metavar="N", help=lengths)
    text_help = "our text tower's batching (default: padded)"
    add("--text", choices=("padded", "packed"), default="padded", help=text_help)
    add("--micro_batch", type=int, default=8, help="clips per step (default: 8)")
    add("--rounds", type=int, default=8, help="timed steps of each side (default: 8)")
    precisions = ("bf16", "fp32")
    precision_help = "to time (default: both)"
    add("--precision", nargs="+", choices=precisions, default=[*precisions], help=precision_help)
    arguments = parser.parse_args(argv)
    device = initialize(Ranks.from_environment())
    # On a GPU, this is a comparison of eager code.
    kernels = "Ours uses eager torch operations, unlike a default run."
    if device.type == "cpu":
        kernels = f"CPU kernels in bf16: ours {report('auto')}, the others' oneDNN."
    text = (
        f"# {load_preset(arguments.preset).name} on {device_name(device)}\n\n"
        f"{torch.get_num_threads()} threads, micro-batch {arguments.micro_batch},"
        f" {arguments.context_length} text tokens, {arguments.text}; torch {torch.__version__}."
        f" {kernels}"
    )
    results = []
    for precision in arguments.precision:
        for name in arguments.against:
            # `transformers` has no SpecAugment.
            for spec_augment in (True, False) if name == "loops" else (False,):
                result = compare(arguments, name, precision, device, spec_augment=spec_augment)
                results.append(result)
    show(arguments.output, "\n\n".join([text, *map(render, results)]), results)
    return 0 if all(result["loss_agrees"] for result in results) else 1


if __name__ == "__main__":
    run_alone(main)
