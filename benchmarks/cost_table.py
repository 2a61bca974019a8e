"""Command: where a training step's time goes, part by part, beside what the hardware needs at least.

    python -m benchmarks.cost_table [--preset …] [--micro_batch 8] [--text_tokens 77] [--output results/cost/NAME.md]

Each part is run by itself, forward and backward, on the inputs it gets in the whole model, in bf16 with the device synchronised
around it. FLOPs are its matrix products', three forward passes' worth for a step. The least bytes are what must move even if
everything inside a part were fused: its input and output once each way with their gradients, its weights twice and their
gradients once, and for the optimiser all it reads and writes. Time lost between parts shows as the difference to the step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import add_output, choose_device, make_parser, show
from benchmarks.sides import add_step_options, initial_state, make_batch, our_model, our_side
from clap_ds.analysis.table import markdown_table
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.data.batch import Batch
from clap_ds.dist.distributed import keep_freed_memory
from clap_ds.model.clap import ClapModel
from clap_ds.native.library import torch_instead
from clap_ds.record.clock import PhaseTimer
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval

BATCH_NORM = "batch norm over mel bins"
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Cost:
    """One part's share of a step: floating-point operations, bytes, seconds."""

    part: str
    flops: float
    least_bytes: float
    forward_s: float
    backward_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def parts_of(model: ClapModel) -> dict[str, str]:
    """The model's parts in order, by what they are called here → by module name; each is called once in a forward pass."""
    return {
        "front end (STFT, mel, dB)": "mel",
        BATCH_NORM: "audio.batch_norm",
        "stretch and fold": "audio.fold",
        "patch embedding": "audio.patch_embed",
        **{f"audio stage {number}": f"audio.stages.{number}" for number in range(len(model.audio.stages))},
        "audio projection": "audio_projection",
        "text embeddings": "text.roberta.embeddings",
        "text layers": "text.roberta.encoder",
        "text projection": "text_projection",
    }


@torch.no_grad()
def count_flops(model: ClapModel, batch: Batch) -> dict[str, float]:
    """FLOPs of each part's matrix products in a forward pass by torch's operations."""
    with torch_instead(), FlopCounterMode(display=False) as counter:
        model(*batch.model_inputs())
    counted = counter.get_flop_counts()
    return {part: float(sum(counted.get(f"ClapModel.{name}", {}).values())) for part, name in parts_of(model).items()}


@torch.no_grad()
def capture(model: ClapModel, batch: Batch) -> dict[str, Call]:
    """What each part is called with in the model's forward pass."""
    calls: dict[str, Call] = {}
    handles = []
    for part, name in parts_of(model).items():

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: str = part) -> None:
            calls[part] = args, kwargs

        handles.append(model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True))
    model(*batch.model_inputs())
    for handle in handles:
        handle.remove()
    return calls


def measure_part(part: str, module: nn.Module, call: Call, flops: float, device: torch.device, rounds: int) -> Cost:
    """Medians over `rounds` after one to warm up; `flops` are of a forward pass."""
    args, kwargs = call
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    times = []
    for _ in range(rounds + 1):
        timer = PhaseTimer(device, instrumented=True)
        inputs = [_leaf(each, is_trained and part != BATCH_NORM) for each in args]
        with timer("forward"):
            output = module(*inputs, **kwargs)
            output = output if isinstance(output, Tensor) else output.last_hidden_state
        with timer("backward"):
            if output.requires_grad:
                output.backward(torch.ones_like(output))
        times.append(timer.seconds)
        module.zero_grad(set_to_none=True)
    forward_s, backward_s = (
        median_interval([each[phase] for each in times[1:]]).median for phase in ("forward", "backward")
    )
    moved = output.nbytes + sum(each.nbytes for each in args if isinstance(each, Tensor) and each.is_floating_point())
    weights = sum(parameter.nbytes for parameter in module.parameters())
    passes, ways = (3, 2) if is_trained else (1, 1)
    return Cost(part, passes * flops, ways * moved + 3 * weights, forward_s, backward_s)


def _leaf(value: Any, requires_grad: bool) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_(requires_grad) if is_floating else value


def measure_step(arguments: argparse.Namespace, config: ClapConfig, device: torch.device) -> tuple[list[Cost], float]:
    """Every part's cost, and the seconds of a whole step."""
    batch = make_batch(arguments, config, device)
    model = our_model(initial_state(config), config, device, low="cast", attention=arguments.attention).train()
    flops = count_flops(model, batch)
    side = our_side(model, "cast")
    steps = [side.step(batch) for _ in range(arguments.rounds + 1)][1:]
    step_s, optimizer_s = (median_interval([step[part] for step in steps]).median for part in ("step", "optimizer"))
    calls = capture(model, batch)
    costs = [
        measure_part(part, model.get_submodule(name), calls[part], flops[part], device, arguments.rounds)
        for part, name in parts_of(model).items()
    ]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # fp32 master, two moments read and written; bf16 gradient read, bf16 weight written.
    costs.append(Cost("optimiser (AdamW, fp32 masters)", 0.0, num_parameters * (6 * 4 + 2 * 2), optimizer_s))
    return costs, step_s


def table(costs: Sequence[Cost], step_s: float) -> str:
    """Markdown, one row a part, in the order of the forward pass."""
    rest = Cost("everything else (loss, pooling, glue)", 0.0, 0.0, max(0.0, step_s - sum(c.seconds for c in costs)))
    whole = Cost("whole step", sum(c.flops for c in costs), sum(c.least_bytes for c in costs), step_s)
    rows = [
        [
            cost.part,
            f"{cost.flops / 1e9:,.2f}",
            f"{cost.least_bytes / 1e9:.3f}",
            f"{1000 * cost.forward_s:,.1f}",
            f"{1000 * cost.backward_s:,.1f}",
            f"{cost.seconds / step_s:.1%}",
            f"{cost.flops / max(cost.seconds, 1e-9) / 1e9:,.0f}",
            f"{cost.least_bytes / max(cost.seconds, 1e-9) / 1e9:,.1f}",
        ]
        for cost in [*costs, rest, whole]
    ]
    rows[-1][4] = ""  # the forward pass's column has the whole step
    columns = "part, GFLOPs, least GB, forward (ms), backward (ms), share of step, GFLOPS reached, GB/s of least"
    return markdown_table(columns.split(", "), rows)


def main(argv: list[str] | None = None) -> int:
    """Measure and show."""
    parser = make_parser("cost_table", __doc__)
    add_step_options(parser, rounds=5)
    parser.add_argument("--attention", default="auto", help="kernel of the window attention")
    add_output(parser)
    arguments = parser.parse_args(argv)
    device, config = choose_device(), load_preset(arguments.preset)
    if device.type == "cpu":
        keep_freed_memory()
    costs, step_s = measure_step(arguments, config, device)
    text = (
        f"# Cost of a step: {config.title} on {device_name(device)}\n\nMicro-batch {arguments.micro_batch},"
        f" {arguments.text_tokens} text tokens ({arguments.text}), bf16, {torch.get_num_threads()} threads;"
        f" torch {torch.__version__}.\n\n{table(costs, step_s)}"
    )
    show(arguments.output, text, {"step_s": step_s, "parts": [asdict(cost) for cost in costs]}, "cost_table", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
