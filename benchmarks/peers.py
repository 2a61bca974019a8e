"""Command: this project's training step against `transformers.ClapModel`'s, side by side in one process.

    python -m benchmarks.peers [--micro_batch 8] [--text_tokens 77] [--precision bf16 fp32] [--rounds 8]

Both sides hold the same weights and take the same batch, and each round times one step of either, in turn, so that what else
the machine does falls on both. Every side runs at its best setting: bf16 by autocast or by cast weights with fp32 masters,
whichever is quicker for it, and the quicker text attention. HF's model takes log-mel features where ours takes waveforms: it
is given them by this project's front end on the same device, timed as part of its step. Its own extractor, which works clip
by clip in NumPy, is timed too and its cost shown apart. Random regularisation is off on both sides, or the losses could not
be compared; `--noise` times the steps with dropout 0.1 and compares losses that noise makes differ.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import choose_device, in_turns, make_parser, seconds, show, table
from benchmarks.sides import Side, add_step_options, make_batch, our_model, our_side, peer_side
from clap_ds.config.errors import run_alone
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.data.batch import Batch
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import MedianInterval, median_interval
from clap_ds.weights.hf_config import feature_extractor

TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""Largest difference of the two losses, relative."""
COMPARED = {"forward": ("front_end", "forward")} | {name: (name,) for name in ("backward", "optimizer", "step")}
"""What ratios are given of, and the parts of a step that make it up."""
SIDES = {
    "ms": "{side}",
    **{part: f"{{{part}:.1f}}" for part in ("front_end", "forward", "backward", "optimizer", "step")},
}
SIDES["first loss"] = "{loss:.5f}"
SPEEDS = {"part": "{part}", "× the peer's speed": "{median:.2f}", "interval": "{low:.2f}–{high:.2f} ({coverage:.0%})"}

Times = Sequence[dict[str, float]]
"""Seconds of a step's parts, round by round."""


def ratios(ours: Times, peer: Times, parts: Sequence[str]) -> MedianInterval:
    """How many times as fast as the peer these parts of a step are, round by round."""
    return median_interval(
        [
            sum(theirs[part] for part in parts) / sum(mine[part] for part in parts)
            for mine, theirs in zip(ours, peer, strict=True)
        ]
    )


def build_sides(
    arguments: argparse.Namespace, config: ClapConfig, precision: str, device: torch.device
) -> dict[str, Side]:
    """Every side of one precision by name."""
    noise, sides = 0.1 if arguments.noise else 0.0, {}
    for low in ["none"] if precision == "fp32" else arguments.modes:
        model = our_model(config, device, low=low, noise=noise, attention="auto")
        sides[f"transformers, {low}"] = peer_side(model, device, low=low, noise=noise)
        sides[f"ours, {low}"] = our_side(model, low)
    return sides


def compare(arguments: argparse.Namespace, config: ClapConfig, precision: str, device: torch.device) -> dict[str, Any]:
    """Time one precision; returns the result as JSON can hold it."""
    batch = make_batch(arguments, config, device)
    sides = build_sides(arguments, config, precision, device)
    steps = {name: functools.partial(side.step, batch) for name, side in sides.items()}
    times = in_turns(steps, arguments.rounds, warm_up=2)
    median = {
        name: {part: median_interval([step[part] for step in steps]).median for part in steps[0]}
        for name, steps in times.items()
    }
    ours, peer = (
        min((name for name in sides if name.startswith(who)), key=lambda name: median[name]["step"])
        for who in ("ours", "transformers")
    )
    losses = {name: side.losses[0] for name, side in sides.items()}
    difference = abs(losses[ours] - losses[peer]) / abs(losses[peer])
    return {
        "precision": precision,
        "ours": ours,
        "peer": peer,
        "median_s": median,
        "speed_ratio": {name: vars(ratios(times[ours], times[peer], parts)) for name, parts in COMPARED.items()},
        "first_loss": losses,
        "loss_difference": difference,
        "loss_agrees": difference < TOLERANCE[precision],
        "extractor_s": extractor_seconds(batch, config),
    }


def extractor_seconds(batch: Batch, config: ClapConfig) -> float:
    """Seconds HF's own feature extractor takes for the batch."""
    extractor, clips = feature_extractor(config.audio), list(batch.waveforms.cpu().numpy())
    extract = functools.partial(extractor, clips, sampling_rate=config.audio.sample_rate, return_tensors="pt")
    return seconds(extract, torch.device("cpu"))


def tables(result: dict[str, Any]) -> str:
    """One precision's result for people."""
    sides = [
        {"side": name, "loss": result["first_loss"][name], **{part: 1000 * value for part, value in times.items()}}
        for name, times in result["median_s"].items()
    ]
    speeds = [{"part": name, **ratio} for name, ratio in result["speed_ratio"].items()]
    best, extractor_s = result["median_s"][result["peer"]], result["extractor_s"]
    extracted = (best["step"] - best["front_end"] + extractor_s) / result["median_s"][result["ours"]]["step"]
    speeds.append({"part": f"step with HF's own feature extractor ({1000 * extractor_s:.0f} ms)", "median": extracted})
    agreement = "agree" if result["loss_agrees"] else "DISAGREE"
    losses = f"Losses differ by {result['loss_difference']:.1e}: {agreement}."
    return "\n\n".join([f"## {result['precision']}", table(SIDES, sides), table(SPEEDS, speeds), losses])


def main(argv: list[str] | None = None) -> int:
    """Compare and show; 1 where the losses disagree."""
    parser = make_parser("peers", __doc__)
    add_step_options(parser, rounds=8)
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--modes", nargs="+", choices=("autocast", "cast"), default=["autocast", "cast"])
    parser.add_argument("--noise", action="store_true", help="dropout, drop path and SpecAugment while timing")
    parser.add_argument(
        "--plain_allocator", action="store_true", help="leave the C library's, for both; else as our CPU ranks set it"
    )
    arguments = parser.parse_args(argv)
    device, config = choose_device(plain_allocator=arguments.plain_allocator), load_preset(arguments.preset)
    results = [compare(arguments, config, precision, device) for precision in arguments.precision]
    text = (
        f"# {config.title} on {device_name(device)}\n\n{torch.get_num_threads()} threads, micro-batch {arguments.micro_batch},"
        f" {arguments.text_tokens} text tokens, {arguments.text}."
    )
    show(arguments.output, "\n\n".join([text, *map(tables, results)]), results)
    return 0 if all(result["loss_agrees"] for result in results) else 1


if __name__ == "__main__":
    run_alone(main)
