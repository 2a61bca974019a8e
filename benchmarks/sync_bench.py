"""Command: what sending gradients costs beyond the step itself, under DeepSpeed as it is, overlapped here, and torch's DDP.

    python -m benchmarks.sync_bench [--rates_mbit 500 1000 2000] [--compute emulated real] [--output DIR]

Two hosts (network namespaces, root needed) with links shaped to each rate; every method in one process, turn and turn about.
`emulated`: the model's layers sleep in forward and backward for a time in proportion to their FLOPs, which leaves the cores
to the communication as a GPU does; their parameters are HTSAT-tiny's, scaled down. `real`: a small CLAP model computes, one
core a rank, which the communication then competes for. Either computes for 1.5 times as long as one all-reduce of all its
gradients takes, measured on the link first.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.shaped_hosts import ShapedHosts, ShapedHostsError, run_on_all, shaped_hosts
from clap_ds.config.settings import ClapSettings
from clap_ds.record.statistics import median_interval

SCALE = 12
"""The emulated model has one parameter for this many of HTSAT-tiny's."""
BUCKET_MB = ClapSettings().gradient_bucket_mb / SCALE
DDP_BUCKET_MB = 25.0 / SCALE
"""torch's default, scaled like the model."""
COMPUTE_PER_COMMUNICATION = 1.5
SMALL_BATCH = 8
METHODS = ("deepspeed", "overlapped", "ddp")


class _Sleep(torch.autograd.Function):
    """Identity that takes time, and gives its weight a gradient without computing one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds, ctx.shape = seconds, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient[0], torch.full(ctx.shape, float(gradient[0].sum())), None


class SleepingModel(nn.Module):
    """HTSAT-tiny + RoBERTa-base by parameter sizes, layer order and shares of the compute, all scaled."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        layers = _layers()
        total = sum(flops for _, flops in layers)
        self.seconds = [forward_s * flops / total for _, flops in layers]
        self.weights = nn.ParameterList(torch.zeros(max(1, numel // SCALE)) for numel, _ in layers)

    def forward(self, x: Tensor) -> Tensor:
        for weight, seconds in zip(self.weights, self.seconds, strict=True):
            x = _Sleep.apply(x, weight, seconds)
        return x.sum()


def _layers() -> list[tuple[int, float]]:
    """(parameters, FLOPs a sample) of each block of HTSAT-tiny + RoBERTa-base in forward order, 77 text tokens."""
    from clap_ds.config.model import load_preset
    from clap_ds.model.clap import ClapModel

    config = load_preset("htsat_tiny_roberta_base")
    with torch.device("meta"):
        model = ClapModel(config)
    layers: list[tuple[int, float]] = []
    stages: Any = model.audio.stages
    for stage, grid in zip(stages, config.audio.stage_grids, strict=True):
        layers += [(_numel(block), 2.0 * _numel(block) * grid**2) for block in stage.blocks]
    roberta: Any = model.text.roberta
    layers.append((_numel(roberta.embeddings), 0.0))
    layers += [(_numel(layer), 2.0 * 77 * _numel(layer)) for layer in roberta.encoder.layer]
    return layers


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _real_model() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    """A small CLAP (about 9 M parameters), and batches of a given size."""
    from clap_ds.config.model import load_preset
    from clap_ds.model.clap import ClapModel

    micro = load_preset("micro")
    audio = micro.audio.model_copy(update={"embed_dim": 64, "num_heads": [2, 4]})
    text = micro.text.model_copy(
        update={"hidden_size": 256, "num_layers": 6, "num_heads": 4, "intermediate_size": 1024, "vocab_size": 12000}
    )
    model = ClapModel(micro.model_copy(update={"audio": audio, "text": text}), drop_path=0, text_dropout=0)

    def batch(size: int) -> tuple[Tensor, ...]:
        ids = torch.randint(3, text.vocab_size, (size, 32))
        return torch.rand(size, audio.num_samples) * 2 - 1, ids, torch.ones_like(ids)

    return model, batch


@dataclass
class Method:
    """One way to synchronise gradients: a step, with and without sending."""

    step: Callable[[bool], None]


def _build(name: str, make_model: Callable[[], nn.Module], loss_of: Callable[[Any], Tensor]) -> Method:
    torch.manual_seed(0)
    model = make_model()
    if name == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ddp = DistributedDataParallel(model, bucket_cap_mb=DDP_BUCKET_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def ddp_step(sending: bool) -> None:
            with nullcontext() if sending else ddp.no_sync():
                loss_of(ddp).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Method(ddp_step)

    import deepspeed

    from clap_ds.engine.gradient_sync import GradientSync

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sync = GradientSync(engine, overlapped=name == "overlapped", bucket_mb=BUCKET_MB)

    def step(sending: bool) -> None:
        sync.before_forward()
        with nullcontext() if sending else sync.off():
            engine.backward(loss_of(engine))
        engine.step()
        sync.after_step()

    return Method(step)


def _median_s(action: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds an action takes all ranks together; the same number on every rank."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        started_s = time.perf_counter()
        action()
        dist.barrier()
        seconds.append(time.perf_counter() - started_s)
    median = torch.tensor(statistics.median(seconds))
    dist.broadcast(median, src=0)
    return float(median)


def _prepare(compute: str) -> tuple[Callable[[], nn.Module], Callable[[Any], Tensor], int]:
    """How to make the model, its loss, and the bytes of its gradients; compute matched to what sending them takes."""
    sample = SleepingModel(0.0) if compute == "emulated" else _real_model()[0]
    gradients = torch.zeros(_numel(sample))
    dist.all_reduce(gradients)
    compute_s = COMPUTE_PER_COMMUNICATION * _median_s(lambda: dist.all_reduce(gradients))
    if compute == "emulated":
        start = torch.ones(1, requires_grad=True)
        return lambda: SleepingModel(compute_s / 3), lambda module: module(start), gradients.nbytes
    from clap_ds.engine.loss import SoftmaxLoss

    batch, loss = _real_model()[1], SoftmaxLoss()

    def loss_of(module: Any, size: int = SMALL_BATCH) -> Tensor:
        return loss(*module(*batch(size)))

    size = math.ceil(SMALL_BATCH * compute_s / _median_s(lambda: loss_of(sample).backward()))
    return lambda: _real_model()[0], functools.partial(loss_of, size=size), gradients.nbytes


def _worker(compute: str, rounds: int) -> None:
    """One rank: seconds of steps with and without sending, by method, printed by rank 0 as JSON."""
    from clap_ds.dist import distributed

    distributed.initialize(distributed.Ranks.from_environment(), compile_cpu_collective=False)
    make_model, loss_of, num_bytes = _prepare(compute)
    methods = {name: _build(name, make_model, loss_of) for name in METHODS}
    for method in methods.values():
        for _ in range(3):
            method.step(True)
    seconds: dict[str, list[float]] = {f"{name} {kind}": [] for name in METHODS for kind in ("sending", "silent")}
    for _ in range(rounds):
        for name, method in methods.items():
            for sending in (True, False):
                taken_s = _median_s(functools.partial(method.step, sending), repeats=1)
                seconds[f"{name} {'sending' if sending else 'silent'}"].append(taken_s)
    if dist.get_rank() == 0:
        print(json.dumps({"num_bytes": num_bytes, "seconds": seconds}), flush=True)
    distributed.leave(0)


def _measure(hosts: ShapedHosts, compute: str, rate_mbit: float, rounds: int) -> dict[str, Any]:
    """Run all methods on two hosts at one rate; exposed seconds of each with an interval."""
    command = [sys.executable, "-m", "benchmarks.sync_bench", "--worker", compute, str(rounds)]
    hosts.shape(rate_mbit)
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    output = run_on_all(hosts, 2, command, {"CUDA_VISIBLE_DEVICES": ""}, port)[0]
    found = json.loads(output.splitlines()[-1])
    row: dict[str, Any] = {"compute": compute, "rate_mbit": rate_mbit, "megabytes": found["num_bytes"] / 1e6}
    for name in METHODS:
        sending, silent = (found["seconds"][f"{name} {kind}"] for kind in ("sending", "silent"))
        exposed = median_interval([a - b for a, b in zip(sending, silent, strict=True)])
        row[name] = {
            "step_s": statistics.median(sending),
            "silent_step_s": statistics.median(silent),
            "exposed_s": exposed.median,
            "low": exposed.low,
            "high": exposed.high,
        }
    return row


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Exposed communication: a step that sends its gradients less one that keeps them; median and 95 % interval, ms.",
        "",
        "| compute | link, Mbit/s | gradients, MB | step without sending | DeepSpeed as it is | overlapped | torch DDP "
        "| overlapped / DeepSpeed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            f"{1000 * row[name]['exposed_s']:.0f} [{1000 * row[name]['low']:.0f}, {1000 * row[name]['high']:.0f}]"
            for name in METHODS
        ]
        ratio = row["overlapped"]["exposed_s"] / row["deepspeed"]["exposed_s"]
        silent = 1000 * row["overlapped"]["silent_step_s"]
        lines.append(
            f"| {row['compute']} | {row['rate_mbit']:g} | {row['megabytes']:.1f} | {silent:.0f} | {' | '.join(cells)}"
            f" | {100 * ratio:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.sync_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates_mbit", type=float, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--compute", nargs="+", choices=("emulated", "real"), default=["emulated", "real"])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every method, with and without sending")
    parser.add_argument("--output", type=Path, help="folder for communication.json and communication.md")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        compute, rounds = arguments.worker
        _worker(compute, int(rounds))
    try:
        with shaped_hosts(2) as hosts:
            rows = [
                _measure(hosts, compute, rate, arguments.rounds)
                for compute in arguments.compute
                for rate in arguments.rates_mbit
            ]
    except ShapedHostsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_table(rows))
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "communication.json").write_text(json.dumps(rows, indent=2) + "\n")
        (arguments.output / "communication.md").write_text(
            f"`{' '.join(['python', '-m', 'benchmarks.sync_bench', *sys.argv[1:]])}`\n\n{_table(rows)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
