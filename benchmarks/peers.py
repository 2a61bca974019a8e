"""Command: this project's training step against other implementations', side by side in one process.

    python -m benchmarks.peers [--against loops transformers] [--micro_batch 8] [--precision bf16 fp32] [--rounds 8]

All sides of a comparison hold the same weights and take the same batch, and each round times one step of each, in turn, so that
what else the machine does falls on all. Ours is the step of `clap_ds/bench.py` on one rank.

- The training loops of open_clip and LAION-CLAP run the preset by autocast, with torch's AdamW as it comes. They are timed as
  published, with SpecAugment (theirs clip by clip, ours at once), and without it on all sides.
- `transformers.ClapModel` runs at its best setting: by autocast or by cast weights with fp32 masters, whichever is quicker. Its
  preset is LAION's (`clap_…`) where it can't express the heads of the one that is asked for, on our side, too. It has no
  SpecAugment.

Models of transformers take log-mel features where ours takes waveforms. They get them by this project's front end on the same
device (LAION-CLAP's loop by its own), timed as part of their step. Dropout and stochastic depth are off on all sides.
Where SpecAugment is off, losses must agree.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import in_turns, make_parser, show, table
from benchmarks.sides import LOOPS, EngineSide, Side, expressible_preset, loop_side, make_batch, transformers_side
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset, preset_argument
from clap_ds.native.convert import report
from clap_ds.ranks.distributed import Ranks, initialize
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import MedianInterval, median_interval

TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""Largest difference of a loss from ours, relative."""
COMPARED = {"forward": ("front_end", "forward")} | {name: (name,) for name in ("backward", "optimizer", "step")}
"""What ratios are given of, and the parts of a step that make it up."""
PARTS = ("front_end", *COMPARED)
SIDES = f"ms {{side}}{''.join(f' | {part} {{{part}:.1f}}' for part in PARTS)} | first loss {{loss:.5f}}"
SPEEDS = "part {part} | ours, × its speed {median:.2f} | interval {low:.2f}–{high:.2f} ({coverage:.0%})"
Times = Sequence[dict[str, float]]
"""Seconds of a step's parts, round by round."""


def ratios(ours: Times, peer: Times, parts: Sequence[str]) -> MedianInterval:
    """How many times as fast as the peer these parts of a step are, round by round."""
    mine, theirs = ([sum(step[part] for part in parts) for step in steps] for steps in (ours, peer))
    return median_interval([b / a for a, b in zip(mine, theirs, strict=True)])


def compare(
    arguments: argparse.Namespace, against: str, precision: str, device: torch.device, *, spec_augment: bool
) -> dict[str, Any]:
    """Time every side of one comparison; returns the result as JSON can hold it."""
    preset = arguments.preset if against == "loops" else expressible_preset(arguments.preset)
    config = load_preset(preset)
    batch = make_batch(arguments, config, device)
    ours = EngineSide(arguments, preset, precision, batch, spec_augment=spec_augment)
    sides: dict[str, Side | EngineSide] = {"ours": ours}
    for low in ["none"] if precision == "fp32" else ["autocast", "cast"]:
        of_side = config, ours.weights, low, device
        if against == "transformers":
            sides[f"transformers, {low}"] = transformers_side(*of_side)
        elif low != "cast":
            for loop in LOOPS:
                sides[f"{loop}'s loop"] = loop_side(*of_side, loop, spec_augment=spec_augment)
    actions = {name: functools.partial(side.step, batch) for name, side in sides.items()}
    times = in_turns(actions, arguments.rounds, warm_up=2)
    median = {
        name: {part: median_interval([step[part] for step in steps]).median for part in PARTS}
        for name, steps in times.items()
    }
    peer, *others = sorted(list(sides)[1:], key=lambda name: median[name]["step"])
    losses = {name: side.losses[0] for name, side in sides.items()}
    difference = max(abs(loss / losses["ours"] - 1) for loss in losses.values())
    return {
        "precision": precision, "preset": preset, "against": against, "spec_augment": spec_augment, "peer": peer,
        "median_s": median, "first_loss": losses, "loss_difference": difference,
        "loss_agrees": spec_augment or difference < TOLERANCE[precision],
        "speed_ratio": {name: vars(ratios(times["ours"], times[peer], parts)) for name, parts in COMPARED.items()},
        "step_ratio": {name: vars(ratios(times["ours"], times[name], COMPARED["step"])) for name in others},
    }  # fmt: skip


def tables(result: dict[str, Any]) -> str:
    """One comparison's result for people."""
    sides = []
    for name, loss in result["first_loss"].items():
        times = {part: 1000 * value for part, value in result["median_s"][name].items()}
        sides.append({"side": name, "loss": loss, **times})
    speeds = [{"part": name, **ratio} for name, ratio in result["speed_ratio"].items()]
    speeds += [{"part": f"step, {name}", **ratio} for name, ratio in result["step_ratio"].items()]
    agreement = "agree" if result["loss_agrees"] else "DISAGREE"
    last = f"Losses differ by up to {result['loss_difference']:.1e}"
    last += ": each side draws its own masks." if result["spec_augment"] else f": {agreement}."
    masks = "as published, with SpecAugment" if result["spec_augment"] else "without SpecAugment"
    header = f"## {result['preset']}, {result['precision']}, {masks}: ours beside {result['peer']}"
    return "\n\n".join([header, table(SIDES, sides), table(SPEEDS, speeds), last])


def main(argv: list[str] | None = None) -> int:
    """1 where losses disagree."""
    parser = make_parser("peers", __doc__)
    add = parser.add_argument
    add("--against", nargs="+", choices=("loops", "transformers"), default=["loops", "transformers"])
    add("--preset", default="htsat_tiny_roberta_base", type=preset_argument)
    add("--text_tokens", type=int, default=77)
    lengths = "LOW and HIGH, uniform; default: all of --text_tokens"
    add("--caption_lengths", type=int, nargs=2, metavar="N", help=lengths)
    add("--text", choices=("padded", "packed"), default="padded", help="our text tower's way")
    add("--micro_batch", type=int, default=8)
    add("--rounds", type=int, default=8)
    add("--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    arguments = parser.parse_args(argv)
    device = initialize(Ranks.from_environment(), compile_cpu_collective=False)
    text = (
        f"# {load_preset(arguments.preset).title} on {device_name(device)}\n\n{torch.get_num_threads()} threads, micro-batch"
        f" {arguments.micro_batch}, {arguments.text_tokens} text tokens, {arguments.text}; torch {torch.__version__}."
    )
    if device.type == "cpu":
        text += f" CPU kernels in bf16: ours {report('auto')}, the others' oneDNN."
    else:
        text += " Ours by torch's operations and not compiled, unlike a default run."
    results = [
        compare(arguments, against, precision, device, spec_augment=spec_augment)
        for precision in arguments.precision
        for against in arguments.against
        for spec_augment in ((True, False) if against == "loops" else (False,))
    ]
    show(arguments.output, "\n\n".join([text, *map(tables, results)]), results)
    return 0 if all(result["loss_agrees"] for result in results) else 1


if __name__ == "__main__":
    run_alone(main)
