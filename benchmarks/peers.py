"""Command: this project's training step against `transformers.ClapModel`'s, side by side in one process.

    python -m benchmarks.peers [--micro_batch 8] [--text_tokens 77] [--precision bf16 fp32] [--rounds 8]

All sides hold the same weights and take the same batch, and each round times one step of each, in turn, so that what else
the machine does falls on all. Ours in bf16 is the step of `clap_ds/bench.py` on one rank (`engine`); what DeepSpeed and the
engine cost shows against the same model, loss and AdamW without them (`bare`). HF's runs at its best setting: by autocast or
by cast weights with fp32 masters, whichever is quicker, and the quicker text attention. Beside it, the same model as the
loops of open_clip and LAION-CLAP train: by autocast, with torch's AdamW as it comes. On CPUs the step is held against the
least time that its products can take at the rate measured for them, and AdamW at the speed of memory.

HF's model takes log-mel features where ours takes waveforms: it is given them by this project's front end on the same device,
timed as part of its step. Its own extractor, which works clip by clip in NumPy, is timed too and its cost shown apart. Random
regularisation is off on all sides, or the losses could not be compared; `--noise` times the steps with dropout 0.1 and
compares losses that noise makes differ.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import choose_device, in_turns, make_parser, show, table
from benchmarks.sides import (
    EngineSide,
    Side,
    add_step_options,
    loop_side,
    make_batch,
    our_model,
    our_side,
    peer_side,
    softmax_loss,
)
from clap_ds.config.errors import run_alone
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.data.batch import Batch
from clap_ds.model.clap import ClapModel
from clap_ds.native import linear
from clap_ds.native.convert import report, reverted
from clap_ds.native.library import unavailable
from clap_ds.planning.trace import trace
from clap_ds.ranks.distributed import Ranks, initialize
from clap_ds.record.clock import seconds
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import MedianInterval, median_interval
from clap_ds.weights.hf_config import feature_extractor

TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""Largest difference of the two losses, relative."""
COMPARED = {"forward": ("front_end", "forward")} | {name: (name,) for name in ("backward", "optimizer", "step")}
"""What ratios are given of, and the parts of a step that make it up."""
PARTS = ("front_end", *COMPARED)
BARE = "ours, bare"
SIDES = f"ms {{side}}{''.join(f' | {part} {{{part}:.1f}}' for part in PARTS)} | first loss {{loss:.5f}}"
SPEEDS = "part {part} | ours, × its speed {median:.2f} | interval {low:.2f}–{high:.2f} ({coverage:.0%})"
BYTES_OF_ADAMW = 6 * 4 + 2 * 2
"""Of a parameter: fp32 master and two moments read and written, bf16 gradient read, bf16 weight written."""
Times = Sequence[dict[str, float]]
"""Seconds of a step's parts, round by round."""


def ratios(ours: Times, peer: Times, parts: Sequence[str]) -> MedianInterval:
    """How many times as fast as the peer these parts of a step are, round by round."""
    mine, theirs = ([sum(step[part] for part in parts) for step in steps] for steps in (ours, peer))
    return median_interval([b / a for a, b in zip(mine, theirs, strict=True)])


def compare(arguments: argparse.Namespace, config: ClapConfig, precision: str, device: torch.device) -> dict[str, Any]:
    """Time every side of one precision; returns the result as JSON can hold it."""
    batch, noise = make_batch(arguments, config, device), 0.1 if arguments.noise else 0.0
    sides: dict[str, Side | EngineSide] = {}
    for low in ["none"] if precision == "fp32" else arguments.modes:
        model = our_model(config, device, low=low, noise=noise)
        sides[f"transformers, {low}"] = peer_side(model, device, low=low, noise=noise)
        if low == "autocast":
            sides["open_clip's loop"] = loop_side(model, device, style="open_clip", noise=noise)
            sides["LAION-CLAP's loop"] = loop_side(model, device, style="LAION", noise=noise)
        if low == "cast":
            sides["ours, engine"] = EngineSide(arguments, batch, noise=noise)
        sides[BARE if low == "cast" else f"ours, {low}"] = our_side(model, low)
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
    if BARE in sides and device.type == "cpu":
        result["limit"] = limit_s(our_model(config, device, low="cast").train(), batch)
    return result | {"extractor_s": extractor_seconds(batch, config)}


def linears_of(model: ClapModel, batch: Batch) -> tuple[Counter[tuple[int, int, int]], int]:
    """Rows, inputs and outputs of the linear layers that a step runs, and the FLOPs of all its products."""
    with reverted(model), trace() as recorded:
        softmax_loss(*model(*batch.model_inputs())).backward()
    model.zero_grad(set_to_none=True)
    shapes: Counter[tuple[int, int, int]] = Counter()
    for operation in recorded.operations:
        if operation.name in ("aten.mm", "aten.addmm") and not operation.backward:
            (rows, inputs), (_, outputs) = operation.shapes[-3:-1]
            shapes[rows, inputs, outputs] += 1
    return shapes, recorded.total("flops")


def linear_seconds(shape: tuple[int, int, int], seconds_each: float) -> float:
    """Seconds of a linear layer's products in bf16 (output, gradients of the input and of the weight), each by the quicker of
    oneDNN and this project's kernels, its quickest of turns that go on for `seconds_each` a product and library."""
    rows, inputs, outputs = shape
    x, dy = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, outputs).bfloat16()
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    ways: list[tuple[Callable[[], Any], ...]] = [
        (lambda: F.linear(x, weight, bias), lambda: dy @ weight, lambda: dy.t() @ x)
    ]
    if not (unavailable() or inputs % linear.BLOCK or outputs % linear.BLOCK):
        ways.append((
            lambda: linear._forward(x, [weight], [bias], None),
            lambda: linear._backward_input(dy, [weight], None),
            lambda: linear._backward_weights(dy, x, [weight], with_bias=False),
        ))  # fmt: skip
    best, number = [float("inf")] * 3, 0
    until = time.perf_counter() + seconds_each * 3 * len(ways)
    while number < 3 or time.perf_counter() < until:
        for way in ways:
            best = [min(least, seconds(action, x.device)) for least, action in zip(best, way, strict=True)]
        number += 1
    return sum(best)


def limit_s(model: ClapModel, batch: Batch, seconds_each: float = 0.05, num_floats: int = 2**26) -> dict[str, float]:
    """Least seconds of a step of a bf16 model on this CPU, and the rates they follow from. Memory's is of a sum of two fp32
    tensors of `num_floats`, the quickest of ten."""
    shapes, flops = linears_of(model, batch)
    linear_flops = sum(6 * rows * inputs * outputs * number for (rows, inputs, outputs), number in shapes.items())
    rate = linear_flops / sum(number * linear_seconds(shape, seconds_each) for shape, number in shapes.items())
    a, b = torch.ones(num_floats), torch.ones(num_floats)
    bytes_per_s = 3 * a.nbytes / min(seconds(lambda: a.add_(b), a.device) for _ in range(10))
    moved = BYTES_OF_ADAMW * sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = {"flops": flops, "product_flops_per_s": rate, "memory_bytes_per_s": bytes_per_s}
    found |= {"products_s": flops / rate, "adamw_s": moved / bytes_per_s}
    return found | {"limit_s": found["products_s"] + found["adamw_s"]}


def extractor_seconds(batch: Batch, config: ClapConfig) -> float:
    """Seconds HF's own feature extractor takes for the batch."""
    extractor, clips = feature_extractor(config.audio), list(batch.audio.cpu().numpy())
    extract = functools.partial(extractor, clips, sampling_rate=config.audio.sample_rate, return_tensors="pt")
    return seconds(extract, torch.device("cpu"))


def tables(result: dict[str, Any]) -> str:
    """One precision's result for people."""
    sides = []
    for name, loss in result["first_loss"].items():
        times = {part: 1000 * value for part, value in result["median_s"][name].items()}
        sides.append({"side": name, "loss": loss, **times})
    speeds = [{"part": name, **ratio} for name, ratio in result["speed_ratio"].items()]
    best, extractor_s = result["median_s"][result["peer"]], result["extractor_s"]
    speeds += [{"part": f"step, {name}", **ratio} for name, ratio in result["step_ratio"].items()]
    extracted = (best["step"] - best["front_end"] + extractor_s) / result["median_s"][result["ours"]]["step"]
    speeds.append({"part": f"step with HF's own feature extractor ({1000 * extractor_s:.0f} ms)", "median": extracted})
    agreement = "agree" if result["loss_agrees"] else "DISAGREE"
    losses = f"Losses differ by {result['loss_difference']:.1e}: {agreement}."
    header = f"## {result['precision']}: {result['ours']}, beside {result['peer']}"
    return "\n\n".join([header, table(SIDES, sides), table(SPEEDS, speeds), losses, *_limit(result)])


def _limit(result: dict[str, Any]) -> list[str]:
    """What share of the least time our step reaches."""
    if not (limit := result.get("limit")):
        return []
    shares = {name: limit["limit_s"] / result["median_s"][name]["step"] for name in (result["ours"], result["peer"])}
    return [
        f"Least time: {limit['flops'] / 1e9:,.0f} GFLOPs at {limit['product_flops_per_s'] / 1e12:.2f} TFLOPS, the rate of its"
        f" products by the quicker of two libraries, and AdamW at {limit['memory_bytes_per_s'] / 1e9:.0f} GB/s:"
        f" {1000 * limit['products_s']:.0f} + {1000 * limit['adamw_s']:.0f} ms. Reached: "
        + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        + "."
    ]


def main(argv: list[str] | None = None) -> int:
    """1 where the losses disagree."""
    parser = make_parser("peers", __doc__)
    add_step_options(parser)
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--modes", nargs="+", choices=("autocast", "cast"), default=["autocast", "cast"])
    parser.add_argument("--noise", action="store_true", help="dropout, drop path and SpecAugment while timing")
    parser.add_argument("--plain_allocator", action="store_true", help="memory as the C library gives it, for both")
    arguments = parser.parse_args(argv)
    device, config = choose_device(plain_allocator=arguments.plain_allocator), load_preset(arguments.preset)
    text = (
        f"# {config.title} on {device_name(device)}\n\n{torch.get_num_threads()} threads, micro-batch {arguments.micro_batch},"
        f" {arguments.text_tokens} text tokens, {arguments.text}; torch {torch.__version__}."
    )
    if device.type == "cpu":
        initialize(Ranks.from_environment(), compile_cpu_collective=False)
        text += f" CPU kernels in bf16: ours {report('auto')}, the others' oneDNN."
    results = [compare(arguments, config, precision, device) for precision in arguments.precision]
    show(arguments.output, "\n\n".join([text, *map(tables, results)]), results)
    return 0 if all(result["loss_agrees"] for result in results) else 1


if __name__ == "__main__":
    run_alone(main)
