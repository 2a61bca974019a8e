"""Command: where a training step's time goes, part by part, beside what the hardware needs at least.

    python -m benchmarks.cost_table [--preset …] [--micro_batch 8] [--text_tokens 77] [--output results/cost/NAME.md]

Each part is run by itself, forward and backward, on the inputs it gets in the whole model, in bf16 with the device synchronised
around it. FLOPs are its matrix products', three forward passes' worth for a step. The least bytes are what must move even if
everything inside a part were fused: its input and output once each way with their gradients, its weights twice and their
gradients once, and for the optimiser all it reads and writes. Time lost between parts shows as the difference to the step.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import choose_device, make_parser, show, table
from benchmarks.sides import add_step_options, make_batch, our_model, our_side
from clap_ds.config.errors import run_alone
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.data.batch import Batch
from clap_ds.model.clap import ClapModel
from clap_ds.native.convert import reverted
from clap_ds.record.clock import PhaseTimer
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval

COLUMNS = (
    "part {part} | GFLOPs {gflops:,.2f} | least GB {least_gb:.3f} | forward, ms {forward_ms:,.1f}"
    " | backward, ms {backward_ms:,.1f} | share of step {share:.1%} | GFLOPS reached {gflops_per_s:,.0f}"
    " | GB/s of least {gb_per_s:,.1f}"
)
Call = tuple[list[Any], dict[str, Any]]


def parts_of(model: ClapModel) -> dict[str, str]:
    """The model's parts in order, by what they are called here → by module name; each is called once in a forward pass."""
    return {
        "front end (STFT, mel, dB)": "mel",
        "batch norm over mel bins": "audio.batch_norm",
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
    """FLOPs of each part's matrix products in a forward pass, by torch's operations."""
    with reverted(model), FlopCounterMode(display=False) as counter:
        model(*batch.model_inputs())
    counted = counter.get_flop_counts()
    return {part: float(sum(counted.get(f"ClapModel.{name}", {}).values())) for part, name in parts_of(model).items()}


def capture(model: ClapModel, batch: Batch) -> dict[str, Call]:
    """What each part is called with in the model's forward pass."""
    calls: dict[str, Call] = {}

    def note(part: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[part] = [_leaf(each) for each in args], kwargs

    with ExitStack() as hooks:
        for part, name in parts_of(model).items():
            note_part = partial(note, part)
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(note_part, with_kwargs=True))
        model(*batch.model_inputs())
    return calls


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def measure_part(module: nn.Module, call: Call, flops: float, device: torch.device, rounds: int) -> dict[str, float]:
    """Medians over `rounds` after one to warm up; `flops` are of a forward pass."""
    args, kwargs = call
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    times = []
    for _ in range(rounds + 1):
        timer = PhaseTimer(device, instrumented=True)
        inputs = [_leaf(each) for each in args]
        with torch.set_grad_enabled(is_trained), timer("forward"):
            output = module(*inputs, **kwargs)
            output = output if isinstance(output, Tensor) else output.last_hidden_state
        with timer("backward"):
            if is_trained:
                output.backward(torch.ones_like(output))
        times.append(timer.seconds)
        module.zero_grad(set_to_none=True)
    moved = sum(each.nbytes for each in (*args, output) if isinstance(each, Tensor) and each.is_floating_point())
    weights = sum(parameter.nbytes for parameter in module.parameters())
    passes, ways = (3, 2) if is_trained else (1, 1)
    medians = (median_interval([each[phase] for each in times[1:]]).median for phase in ("forward", "backward"))
    return cost(passes * flops, ways * moved + 3 * weights, *medians)


def cost(flops: float, least_bytes: float, forward_s: float, backward_s: float = 0.0) -> dict[str, float]:
    """One part's row, without its name and share."""
    gflops, least_gb, seconds = flops / 1e9, least_bytes / 1e9, max(forward_s + backward_s, 1e-9)
    row = {"gflops": gflops, "least_gb": least_gb, "gflops_per_s": gflops / seconds, "gb_per_s": least_gb / seconds}
    return row | {"forward_ms": 1000 * forward_s, "backward_ms": 1000 * backward_s, "seconds": seconds}


def measure_step(arguments: argparse.Namespace, config: ClapConfig, device: torch.device) -> list[dict[str, Any]]:
    """Every part's cost in the order of the forward pass, then the rest's and the whole step's."""
    batch = make_batch(arguments, config, device, arguments.micro_batch)
    model = our_model(config, device, low="cast", attention=arguments.attention).train()
    flops = count_flops(model, batch)
    side = our_side(model, "cast")
    steps = [side.step(batch) for _ in range(arguments.rounds + 1)][1:]
    step_s, optimizer_s = (median_interval([step[part] for step in steps]).median for part in ("step", "optimizer"))
    calls, rows = capture(model, batch), {}
    for part, name in parts_of(model).items():
        rows[part] = measure_part(model.get_submodule(name), calls[part], flops[part], device, arguments.rounds)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # fp32 master, two moments read and written; bf16 gradient read, bf16 weight written.
    rows["optimiser (AdamW, fp32 masters)"] = cost(0.0, num_parameters * (6 * 4 + 2 * 2), optimizer_s)
    gflops, least_gb, parts_s = (sum(row[name] for row in rows.values()) for name in ("gflops", "least_gb", "seconds"))
    rows["everything else (loss, pooling, glue)"] = cost(0.0, 0.0, max(0.0, step_s - parts_s))
    rows["whole step"] = cost(1e9 * gflops, 1e9 * least_gb, step_s)
    return [{"part": part, **row, "share": row["seconds"] / step_s} for part, row in rows.items()]


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("cost_table", __doc__)
    add_step_options(parser, rounds=5)
    parser.add_argument("--attention", default="auto", help="kernel of the window attention")
    arguments = parser.parse_args(argv)
    device, config = choose_device(), load_preset(arguments.preset)
    rows = measure_step(arguments, config, device)
    text = (
        f"# Cost of a step: {config.title} on {device_name(device)}\n\nMicro-batch {arguments.micro_batch},"
        f" {arguments.text_tokens} text tokens ({arguments.text}), bf16, {torch.get_num_threads()} threads;"
        f" torch {torch.__version__}.\n\n{table(COLUMNS, rows)}"
    )
    show(arguments.output, text, rows)


if __name__ == "__main__":
    run_alone(main)
