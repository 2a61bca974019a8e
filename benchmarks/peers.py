"""Command: this project's training step against `transformers.ClapModel`'s, side by side in one process.

    python -m benchmarks.peers [--micro_batch 8] [--text_tokens 77] [--precision bf16 fp32] [--rounds 8]

All sides hold the same weights and take the same batch, and each round times one step of each, in turn, so that what else
the machine does falls on all. Ours in bf16 is the step of `clap_ds/bench.py` on one rank (`engine`). HF's runs at its best
setting: by autocast or by cast weights with fp32 masters, whichever is quicker, and the quicker text attention. Beside it,
the same model as the loops of open_clip and LAION-CLAP train: by autocast, with torch's AdamW as it comes.

HF's model takes log-mel features where ours takes waveforms: it is given them by this project's front end on the same device,
timed as part of its step; its own extractor, clip by clip in NumPy, would be slower. Random regularisation is off on all sides,
or the losses could not be compared.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import in_turns, make_parser, show, table
from benchmarks.sides import EngineSide, Side, make_batch, our_model, our_side, peer_side
from clap_ds.config.errors import run_alone
from clap_ds.config.model import ClapConfig, load_preset, preset_argument
from clap_ds.native.convert import report
from clap_ds.ranks.distributed import Ranks, initialize
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import MedianInterval, median_interval

TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""Largest difference of the two losses, relative."""
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


def compare(arguments: argparse.Namespace, config: ClapConfig, precision: str, device: torch.device) -> dict[str, Any]:
    """Time every side of one precision; returns the result as JSON can hold it."""
    batch = make_batch(arguments, config, device)
    sides: dict[str, Side | EngineSide] = {}
    for low in ["none"] if precision == "fp32" else ["autocast", "cast"]:
        model = our_model(config, device, low)
        sides[f"transformers, {low}"] = peer_side(model, device, low)
        if low == "autocast":
            sides["open_clip's loop"] = peer_side(model, device, low, "open_clip")
            sides["LAION-CLAP's loop"] = peer_side(model, device, low, "LAION")
        if low == "cast":
            sides["ours, engine"] = EngineSide(arguments, batch)
        else:
            sides[f"ours, {low}"] = our_side(model, low)
    actions = {name: functools.partial(side.step, batch) for name, side in sides.items()}
    times = in_turns(actions, arguments.rounds, warm_up=2)
    median = {
        name: {part: median_interval([step[part] for step in steps]).median for part in PARTS}
        for name, steps in times.items()
    }
    by_speed = sorted(sides, key=lambda name: median[name]["step"])
    peer = next(name for name in by_speed if name.startswith("transformers"))
    ours = next(name for name in ("ours, engine", *by_speed) if name in sides and name.startswith("ours"))
    losses = {name: side.losses[0] for name, side in sides.items()}
    difference = abs(losses[ours] - losses[peer]) / abs(losses[peer])
    result: dict[str, Any] = {"precision": precision, "ours": ours, "peer": peer, "median_s": median}
    result |= {"first_loss": losses, "loss_difference": difference, "loss_agrees": difference < TOLERANCE[precision]}
    result["speed_ratio"] = {name: vars(ratios(times[ours], times[peer], parts)) for name, parts in COMPARED.items()}
    others = [name for name in by_speed if name not in (ours, peer)]
    result["step_ratio"] = {name: vars(ratios(times[ours], times[name], COMPARED["step"])) for name in others}
    return result


def tables(result: dict[str, Any]) -> str:
    """One precision's result for people."""
    sides = []
    for name, loss in result["first_loss"].items():
        times = {part: 1000 * value for part, value in result["median_s"][name].items()}
        sides.append({"side": name, "loss": loss, **times})
    speeds = [{"part": name, **ratio} for name, ratio in result["speed_ratio"].items()]
    speeds += [{"part": f"step, {name}", **ratio} for name, ratio in result["step_ratio"].items()]
    agreement = "agree" if result["loss_agrees"] else "DISAGREE"
    losses = f"Losses differ by {result['loss_difference']:.1e}: {agreement}."
    header = f"## {result['precision']}: {result['ours']}, beside {result['peer']}"
    return "\n\n".join([header, table(SIDES, sides), table(SPEEDS, speeds), losses])


def main(argv: list[str] | None = None) -> int:
    """1 where the losses disagree."""
    parser = make_parser("peers", __doc__)
    add = parser.add_argument
    add("--preset", default="clap_htsat_tiny_roberta_base", type=preset_argument)
    add("--text_tokens", type=int, default=77)
    lengths = "LOW and HIGH, uniform; default: all of --text_tokens"
    add("--caption_lengths", type=int, nargs=2, metavar="N", help=lengths)
    add("--text", choices=("padded", "packed"), default="padded", help="our text tower's way")
    add("--micro_batch", type=int, default=8)
    add("--rounds", type=int, default=8)
    add("--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    arguments = parser.parse_args(argv)
    device = initialize(Ranks.from_environment(), compile_cpu_collective=False)
    config = load_preset(arguments.preset)
    text = (
        f"# {config.title} on {device_name(device)}\n\n{torch.get_num_threads()} threads, micro-batch {arguments.micro_batch},"
        f" {arguments.text_tokens} text tokens, {arguments.text}; torch {torch.__version__}."
    )
    if device.type == "cpu":
        text += f" CPU kernels in bf16: ours {report('auto')}, the others' oneDNN."
    else:
        text += " Ours by torch's operations and not compiled, unlike a default run."
    results = [compare(arguments, config, precision, device) for precision in arguments.precision]
    show(arguments.output, "\n\n".join([text, *map(tables, results)]), results)
    return 0 if all(result["loss_agrees"] for result in results) else 1


if __name__ == "__main__":
    run_alone(main)
