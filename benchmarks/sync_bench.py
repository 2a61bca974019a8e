"""Command: what sending gradients costs beyond the step itself, under DeepSpeed as it is, overlapped here, and torch's DDP.

    python -m benchmarks.sync_bench [--rates_mbit 500 1000 2000] [--compute emulated real] [--output FILE.md]

Two hosts (network namespaces, root needed) with links shaped to each rate; every method in one process, turn and turn about.
The model's parameters are HTSAT-tiny's, scaled down. `emulated`: its layers sleep in forward and backward for a time in
proportion to their FLOPs, which leaves the cores to the communication as a GPU does. `real`: they multiply matrices for as
long, one core a rank, which the communication then competes for. Either is 1.5 times what one all-reduce of all gradients
takes, measured on the link first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import in_turns, make_parser, show, table
from benchmarks.shaped_hosts import run_ranks, shape, shaped_hosts
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset
from clap_ds.config.settings import ClapSettings
from clap_ds.dist import distributed
from clap_ds.model.clap import ClapModel
from clap_ds.record.statistics import median_interval

SCALE = 12
"""The emulated model has one parameter for this many of HTSAT-tiny's."""
BUCKET_MB = ClapSettings().gradient_bucket_mb / SCALE
DDP_BUCKET_MB = 25.0 / SCALE
"""torch's default, scaled like the model."""
COMPUTE_PER_COMMUNICATION = 1.5
METHODS = {"deepspeed": "DeepSpeed as it is", "overlapped": "overlapped", "ddp": "torch DDP"}
COLUMNS = {
    "compute": "{compute}",
    "link, Mbit/s": "{rate_mbit:g}",
    "gradients, MB": "{megabytes:.1f}",
    "step without sending": "{overlapped[silent_step_ms]:.0f}",
    **{
        title: f"{{{name}[exposed_ms]:.0f}} [{{{name}[low]:.0f}}, {{{name}[high]:.0f}}]"
        for name, title in METHODS.items()
    },
    "overlapped / DeepSpeed": "{ratio:.0%}",
}
INPUT = torch.ones(1, requires_grad=True)
Step = Callable[[bool], None]
"""A training step; whether gradients are sent."""


class _Work(torch.autograd.Function):
    """Identity that takes time, and gives its weight a gradient without computing one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: Callable[[float], object], seconds: float) -> Tensor:
        work(seconds)
        ctx.work, ctx.seconds, ctx.shape = work, seconds, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        ctx.work(2 * ctx.seconds)
        return gradient[0], torch.full(ctx.shape, float(gradient[0].sum())), None, None


class EmulatedModel(nn.Module):
    """HTSAT-tiny + RoBERTa-base by parameter sizes, layer order and shares of the compute, all scaled.

    Args:
        work: spends the seconds it is given.
        forward_s: of a forward pass; a backward pass takes twice that.
    """

    def __init__(self, work: Callable[[float], object] = time.sleep, forward_s: float = 0.0) -> None:
        super().__init__()
        config = load_preset("htsat_tiny_roberta_base")
        with torch.device("meta"):
            model: Any = ClapModel(config)
        grids = zip(model.audio.stages, config.audio.stage_grids, strict=True)
        layers = [(block, grid**2) for stage, grid in grids for block in stage.blocks]
        layers += [(model.text.roberta.embeddings, 0), *((layer, 77) for layer in model.text.roberta.encoder.layer)]
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer, _ in layers]
        flops = [size * rows for size, (_, rows) in zip(sizes, layers, strict=True)]
        self.work, self.seconds = work, [forward_s * each / sum(flops) for each in flops]
        self.weights = nn.ParameterList(torch.zeros(max(1, size // SCALE)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for weight, seconds in zip(self.weights, self.seconds, strict=True):
            x = _Work.apply(x, weight, self.work, seconds)
        return x.sum()


def _matrix_products() -> Callable[[float], object]:
    """Work that computes for so many seconds where nothing else does."""
    a = torch.rand(256, 256)
    once_s = _seconds(lambda: [a @ a for _ in range(1000)]) / 1000
    return lambda seconds: [a @ a for _ in range(round(seconds / once_s))]


def _ddp_step(model: nn.Module) -> Step:
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=DDP_BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(sending: bool) -> None:
        with nullcontext() if sending else ddp.no_sync():
            ddp(INPUT).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed_step(model: nn.Module, *, overlapped: bool) -> Step:
    import deepspeed

    from clap_ds.engine.gradient_sync import GradientSync

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sync = GradientSync(engine, overlapped=overlapped, bucket_mb=BUCKET_MB)

    def step(sending: bool) -> None:
        sync.before_forward()
        with nullcontext() if sending else sync.off():
            engine.backward(engine(INPUT))
        engine.step()
        sync.after_step()

    return step


def _seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds an action takes all ranks together; the same number on every rank."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        started_s = time.perf_counter()
        action()
        dist.barrier()
        times.append(time.perf_counter() - started_s)
    median = torch.tensor(median_interval(times).median)
    dist.broadcast(median, src=0)
    return float(median)


def _worker(compute: str, rounds: int) -> None:
    """One rank: seconds of steps with and without sending, by method, printed by rank 0 as JSON."""
    distributed.initialize(distributed.Ranks.from_environment(), compile_cpu_collective=False)
    gradients = torch.cat([weight.detach() for weight in EmulatedModel().parameters()])
    dist.all_reduce(gradients)
    forward_s = COMPUTE_PER_COMMUNICATION / 3 * _seconds(lambda: dist.all_reduce(gradients))
    work = time.sleep if compute == "emulated" else _matrix_products()
    actions = {}
    for name in METHODS:
        model = EmulatedModel(work, forward_s)
        step = _ddp_step(model) if name == "ddp" else _deepspeed_step(model, overlapped=name == "overlapped")
        for _ in range(3):
            step(True)
        for kind in ("sending", "silent"):
            actions[f"{name} {kind}"] = partial(_seconds, partial(step, kind == "sending"), repeats=1)
    seconds = in_turns(actions, rounds)
    if dist.get_rank() == 0:
        print(json.dumps({"num_bytes": gradients.nbytes, "seconds": seconds}), flush=True)
    distributed.leave(0)


def _measure(hosts: Sequence[str], compute: str, rate_mbit: float, rounds: int) -> dict[str, Any]:
    """Run all methods on two hosts at one rate; each one's exposed milliseconds with an interval."""
    shape(hosts, rate_mbit)
    worker = [sys.executable, "-m", "benchmarks.sync_bench", "--worker", "--compute", compute, "--rounds", str(rounds)]
    found = json.loads(run_ranks(hosts, worker).splitlines()[-1])
    row: dict[str, Any] = {"compute": compute, "rate_mbit": rate_mbit, "megabytes": found["num_bytes"] / 1e6}
    for name in METHODS:
        sending, silent = ([1000 * s for s in found["seconds"][f"{name} {kind}"]] for kind in ("sending", "silent"))
        exposed = median_interval([a - b for a, b in zip(sending, silent, strict=True)])
        row[name] = {"step_ms": median_interval(sending).median, "silent_step_ms": median_interval(silent).median}
        row[name] |= {"exposed_ms": exposed.median, "low": exposed.low, "high": exposed.high}
    return {**row, "ratio": row["overlapped"]["exposed_ms"] / row["deepspeed"]["exposed_ms"]}


def main(argv: list[str] | None = None) -> None:
    """Measure and show.

    Raises:
        UserError: the hosts can't be made, or a rank failed.
    """
    parser = make_parser("sync_bench", __doc__)
    parser.add_argument("--rates_mbit", type=float, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--compute", nargs="+", choices=("emulated", "real"), default=["emulated", "real"])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every method, with and without sending")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        _worker(arguments.compute[0], arguments.rounds)
    with shaped_hosts() as hosts:
        runs = itertools.product(arguments.compute, arguments.rates_mbit)
        rows = [_measure(hosts, compute, rate, arguments.rounds) for compute, rate in runs]
    title = (
        "Exposed communication: a step that sends its gradients less one that keeps them; median and 95 % interval, ms."
    )
    show(arguments.output, f"{title}\n\n{table(COLUMNS, rows)}", rows)


if __name__ == "__main__":
    run_alone(main)
