"""Command: where a training step's time goes, part by part, beside what the hardware needs at least.

    python -m benchmarks.cost_table [--preset …] [--micro-batch 8] [--text-tokens 77] [--output results/cost/NAME.md]

Each part is run by itself, forward and backward, on the inputs it gets in the whole model, in bf16 with the device synchronised
around it. FLOPs are its matrix products', three forward passes' worth for a step. The least bytes are what must move even if
everything inside a part were fused: its input and output once each way with their gradients, its weights twice and their
gradients once, and for the optimiser all it reads and writes. Time lost between parts shows as the difference to the step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import peers
from clap_ds.config.model import ClapConfig, load_preset, preset_names
from clap_ds.data.batch import Batch
from clap_ds.dist.distributed import keep_freed_memory
from clap_ds.model.clap import ClapModel
from clap_ds.native.convert import reverted
from clap_ds.record.hardware import device_name

Clock = Callable[[torch.device], float]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Cost:
    """One part's share of a step: floating-point operations, bytes, seconds."""

    part: str
    flops: float
    least_bytes: float
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def parts(model: ClapModel) -> dict[str, nn.Module]:
    """The model's parts in order; each is called once in a forward pass."""
    stages = {f"audio stage {number}": stage for number, stage in enumerate(model.audio.stages)}
    return {
        "front end (STFT, mel, dB)": model.mel,
        "batch norm over mel bins": model.audio.batch_norm,
        "stretch and fold": model.audio.fold,
        "patch embedding": model.audio.patch_embed,
        **stages,
        "audio projection": model.audio_projection,
        "text embeddings": model.text.roberta.embeddings,
        "text layers": model.text.roberta.encoder,
        "text projection": model.text_projection,
    }


def capture(model: ClapModel, batch: Batch) -> dict[str, Call]:
    """What each part is called with in the model's forward pass."""
    calls: dict[str, Call] = {}
    handles = []
    for name, module in parts(model).items():

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            calls[name] = args, kwargs

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        model(*batch.model_inputs())
    for handle in handles:
        handle.remove()
    return calls


def measure_part(
    name: str,
    module: nn.Module,
    call: Call,
    clock: Clock,
    device: torch.device,
    rounds: int,
) -> Cost:
    """Medians over `rounds` after one to warm up; FLOPs as torch computes it."""
    args, kwargs = call
    trained = any(parameter.requires_grad for parameter in module.parameters())
    times = []
    for _ in range(rounds + 1):
        inputs = [_leaf(each, trained and name != "batch norm over mel bins") for each in args]
        started_s = clock(device)
        output = _tensor(module(*inputs, **kwargs))
        forward_done_s = clock(device)
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        times.append((forward_done_s - started_s, clock(device) - forward_done_s))
        module.zero_grad(set_to_none=True)
    with torch.no_grad(), reverted(module), FlopCounterMode(display=False) as counter:
        module(*args, **kwargs)
    moved = sum(each.nbytes for each in args if isinstance(each, Tensor) and each.is_floating_point()) + output.nbytes
    weights = sum(parameter.nbytes for parameter in module.parameters())
    factor = 2 if trained else 1
    forward_s, backward_s = (statistics.median(each) for each in zip(*times[1:], strict=True))
    flops = counter.get_total_flops() * (3 if trained else 1)
    return Cost(name, flops, factor * moved + 3 * weights, forward_s, backward_s)


def _leaf(value: Any, requires_grad: bool) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_(requires_grad)
    return value


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.last_hidden_state


def measure_step(arguments: argparse.Namespace, config: ClapConfig, device: torch.device) -> tuple[list[Cost], float]:
    """Every part's cost, and the seconds of a whole step."""
    batch = peers.make_batch(arguments, config, device)
    state = peers.initial_state(config)
    side = peers.our_side("ours", state, config, device, low="cast", noise=0.0, attention=arguments.attention)
    side.now = clock = peers.CLOCKS[arguments.clock]
    model = side.model
    assert isinstance(model, ClapModel)
    for _ in range(arguments.rounds + 1):
        side.step(batch)
    calls = capture(model, batch)
    costs = [
        measure_part(name, module, calls[name], clock, device, arguments.rounds)
        for name, module in parts(model).items()
    ]
    sizes = [parameter.numel() for parameter in model.parameters()]
    # fp32 master, two moments read and written; bf16 gradient read, bf16 weight written.
    optimizer_s = statistics.median(side.seconds["optimizer"][1:])
    costs.append(Cost("optimiser (AdamW, fp32 masters)", 0.0, sum(sizes) * (6 * 4 + 2 * 2), optimizer_s, 0.0))
    return costs, statistics.median(side.seconds["step"][1:])


def table(costs: list[Cost], step_s: float) -> str:
    """Markdown, one row a part, in the order of the forward pass."""
    lines = [
        "| part | GFLOPs | least GB | forward, ms | backward, ms | share of step | GFLOPS reached | GB/s of least |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rest = Cost(
        "everything else (loss, pooling, glue)", 0.0, 0.0, max(0.0, step_s - sum(c.seconds for c in costs)), 0.0
    )
    for cost in [*costs, rest]:
        seconds = max(cost.seconds, 1e-9)
        lines.append(
            f"| {cost.part} | {cost.flops / 1e9:,.2f} | {cost.least_bytes / 1e9:.3f} | {1000 * cost.forward_s:,.1f} |"
            f" {1000 * cost.backward_s:,.1f} | {cost.seconds / step_s:.1%} | {cost.flops / seconds / 1e9:,.0f} |"
            f" {cost.least_bytes / seconds / 1e9:,.1f} |"
        )
    flops, least = sum(cost.flops for cost in costs), sum(cost.least_bytes for cost in costs)
    lines.append(
        f"| whole step | {flops / 1e9:,.2f} | {least / 1e9:.3f} | | | {1000 * step_s:,.1f} ms | {flops / step_s / 1e9:,.0f} | |"
    )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--preset", default="htsat_tiny_roberta_base", choices=preset_names())
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=77)
    parser.add_argument("--caption-lengths", type=int, nargs=2, metavar=("LOW", "HIGH"), help="uniform; default: full")
    parser.add_argument("--text", choices=("padded", "packed"), default="padded")
    parser.add_argument("--attention", default="auto", help="kernel of the window attention")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=tuple(peers.CLOCKS), default="wall")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write the table here too")
    arguments = parser.parse_args(argv)
    device, config = torch.device(arguments.device), load_preset(arguments.preset)
    if device.type == "cpu":
        keep_freed_memory()
    costs, step_s = measure_step(arguments, config, device)
    given = " ".join(sys.argv[1:] if argv is None else argv)
    clock = "wall time" if arguments.clock == "wall" else "CPU seconds of the process"
    text = (
        f"# Cost of a step: {config.title} on {device_name(device)}\n\nMicro-batch {arguments.micro_batch},"
        f" {arguments.text_tokens} text tokens ({arguments.text}), bf16, {torch.get_num_threads()} threads, {clock};"
        f" torch {torch.__version__}. Made by `python -m benchmarks.cost_table {given}`.\n\n{table(costs, step_s)}"
    )
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
