"""Measure the exposed time of gradient all-reduce with DeepSpeed's default and with this project's overlap, on CPU ranks.

    DS_ACCELERATOR=cpu deepspeed --hostfile hosts --module benchmarks.allreduce_overlap [--output FILE.md]

Both methods are interleaved in one process. The model has HTSAT-tiny's parameters, scaled down. Its layers sleep in proportion
to their FLOPs, which leaves the cores to communication, as on a GPU. The sleep of a step is 1.5 times one all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import in_turns, make_parser, show, table
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset
from clap_ds.config.settings import ClapSettings
from clap_ds.distributed import init
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.intervals import median_interval
from clap_ds.run_records.timers import seconds

SCALE = 12
"""Parameters of HTSAT-tiny per parameter of the emulated model."""
COMPUTE_PER_ALLREDUCE = 1.5
METHODS = ("deepspeed", "overlapped")
COLUMNS = (
    "ranks {ranks} | gradients, MB {megabytes:.1f} | all-reduce alone {allreduce_ms:.0f}"
    " | DeepSpeed as it is {deepspeed[median]:.0f} [{deepspeed[low]:.0f}, {deepspeed[high]:.0f}]"
    " | overlapped {overlapped[median]:.0f} [{overlapped[low]:.0f}, {overlapped[high]:.0f}]"
    " | overlapped / DeepSpeed {ratio:.0%}"
)


class _Layer(torch.autograd.Function):
    """Identity that sleeps, and gives its weight a constant gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.forward_s, ctx.weight = forward_s, weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        time.sleep(2 * ctx.forward_s)
        return gradient[0], torch.ones_like(ctx.weight), None


class EmulatedModel(nn.Module):
    """Emulates HTSAT-tiny + RoBERTa-base: scaled parameter sizes, layer order and compute shares. `forward_s`: total seconds of
    the forward pass; the backward pass takes twice that."""

    def __init__(self, forward_s: float = 0.0) -> None:
        super().__init__()
        config = load_preset("htsat_tiny_roberta_base")
        with torch.device("meta"):
            model: Any = ClapModel(config)
        grids = zip(model.audio.stages, config.audio.stage_grids, strict=True)
        layers = [(block, grid**2) for stage, grid in grids for block in stage.blocks]
        layers += [(model.text.roberta.embeddings, 0), *((layer, 77) for layer in model.text.roberta.encoder.layer)]
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer, _ in layers]
        flops = [size * rows for size, (_, rows) in zip(sizes, layers, strict=True)]
        self.seconds = [forward_s * each / sum(flops) for each in flops]
        self.weights = nn.ParameterList(torch.zeros(max(1, size // SCALE)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for weight, forward_s in zip(self.weights, self.seconds, strict=True):
            x = _Layer.apply(x, weight, forward_s)
        return x.sum()


def _step_by(method: str, model: nn.Module) -> Callable[[bool], None]:
    """Return a training step; its argument is whether gradients are sent."""
    import deepspeed

    from clap_ds.engine.gradient_sync import GradientSync

    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 1e-6}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    bucket_mb = ClapSettings().bucket_cap_mb / SCALE
    sync = GradientSync(engine, overlapped=method == "overlapped", bucket_mb=bucket_mb)

    def step(sending: bool) -> None:
        with nullcontext() if sending else sync.off():
            engine.backward(engine(torch.ones(1, requires_grad=True)))
        engine.step()

    return step


def _seconds(action: Callable[[], object]) -> float:
    """Time an action over all ranks."""
    dist.barrier()
    return seconds(lambda: (action(), dist.barrier()), torch.device("cpu"))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("allreduce_overlap", __doc__)
    rounds = "timed steps of each method, with and without sending (default: 9)"
    parser.add_argument("--rounds", type=int, default=9, help=rounds)
    parser.add_argument("--local_rank", type=int, help="ignored; from DeepSpeed's launcher")
    arguments = parser.parse_args(argv)
    init.initialize(init.Ranks.from_environment())
    gradients = torch.cat([weight.detach() for weight in EmulatedModel().parameters()])
    took_s = torch.tensor(min(_seconds(lambda: dist.all_reduce(gradients)) for _ in range(4)))
    dist.broadcast(took_s, src=0)
    steps = {name: _step_by(name, EmulatedModel(COMPUTE_PER_ALLREDUCE / 3 * float(took_s))) for name in METHODS}
    actions = {
        (name, sent): partial(_seconds, partial(steps[name], sent)) for name in METHODS for sent in (True, False)
    }
    times = in_turns(actions, arguments.rounds, warm_up=2)
    row: dict[str, Any] = {"ranks": dist.get_world_size(), "megabytes": gradients.nbytes / 1e6}
    for name in METHODS:
        pairs = zip(times[name, True], times[name, False], strict=True)
        row[name] = vars(median_interval([1000 * (sending - silent) for sending, silent in pairs]))
    row |= {"allreduce_ms": 1000 * float(took_s), "ratio": row["overlapped"]["median"] / row["deepspeed"]["median"]}
    if dist.get_rank() == 0:
        title = "Exposed communication in ms: step time with sending gradients minus without; median and interval"
        show(arguments.output, f"{title}\n\n{table(COLUMNS, [row])}", [row])
    init.leave(0)


if __name__ == "__main__":
    run_alone(main)
