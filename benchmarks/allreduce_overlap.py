"""Measure the exposed time of gradient all-reduce with DeepSpeed's default and with this project's overlap.

    python -m benchmarks.allreduce_overlap [--rates_mbit 500 1000 2000] [--output FILE.md]

Uses two network namespaces as hosts (needs root and iproute2), with links shaped to each rate. Both methods are interleaved in
one process. The model has HTSAT-tiny's parameters, scaled down. Its layers sleep in proportion to their FLOPs, which leaves the
cores to communication, as on a GPU. The total sleep is 1.5 times one all-reduce of all gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import exit_on_sigterm, in_turns, make_parser, show, table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import load_preset
from clap_ds.config.paths import PACKAGE
from clap_ds.config.settings import ClapSettings
from clap_ds.distributed import init
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.intervals import median_interval
from clap_ds.run_records.timers import seconds

SCALE = 12
"""Parameters of HTSAT-tiny per parameter of the emulated model."""
COMPUTE_PER_ALLREDUCE = 1.5
METHODS, KINDS = ("deepspeed", "overlapped"), ("sending", "silent")
COLUMNS = (
    "link, Mbit/s {rate_mbit:g} | gradients, MB {megabytes:.1f}"
    " | DeepSpeed as it is {deepspeed[median]:.0f} [{deepspeed[low]:.0f}, {deepspeed[high]:.0f}]"
    " | overlapped {overlapped[median]:.0f} [{overlapped[low]:.0f}, {overlapped[high]:.0f}]"
    " | overlapped / DeepSpeed {ratio:.0%}"
)
SUBNET = "10.98.0"
VARIABLES = (
    *["WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu"],
    *f"MASTER_ADDR={SUBNET}.1 MASTER_PORT=29555 GLOO_SOCKET_IFNAME=eth0".split(),
    f"PYTHONPATH={PACKAGE.parent}",
)
"""Variables that a launcher sets, except the rank."""


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


def _worker(rounds: int) -> None:
    """Run one rank. Rank 0 prints seconds of steps with and without sending, by method, as JSON."""
    init.initialize(init.Ranks.from_environment())
    gradients = torch.cat([weight.detach() for weight in EmulatedModel().parameters()])
    took_s = torch.tensor(min(_seconds(lambda: dist.all_reduce(gradients)) for _ in range(4)))
    dist.broadcast(took_s, src=0)
    actions = {}
    for name in METHODS:
        step = _step_by(name, EmulatedModel(COMPUTE_PER_ALLREDUCE / 3 * float(took_s)))
        for kind in KINDS:
            actions[f"{name} {kind}"] = partial(_seconds, partial(step, kind == "sending"))
    found = {"num_bytes": gradients.nbytes, "seconds": in_turns(actions, rounds, warm_up=2)}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    init.leave(0)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def shaped_hosts() -> Iterator[list[str]]:
    """Connect two namespaces through interfaces `eth0` and yield their names. UserError without root or iproute2."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise UserError("network namespaces need root, and `ip` and `tc`: run as root and install iproute2")
    hosts = [f"clap{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for host in hosts:
            _run(f"ip netns add {host}")
        _run(f"ip link add eth0 netns {hosts[0]} type veth peer name eth0 netns {hosts[1]}")
        for number, host in enumerate(hosts, start=1):
            for change in (f"addr add {SUBNET}.{number}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _run(f"ip -n {host} {change}")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def _measure(hosts: Sequence[str], rate_mbit: float, rounds: int) -> dict[str, Any]:
    """Run all methods at one rate, with one rank per host, pinned to a core. Return each one's exposed ms with an interval."""
    processes = []
    for rank, host in enumerate(hosts):
        _run(f"tc -n {host} qdisc replace dev eth0 root tbf rate {rate_mbit}mbit burst 512kbit latency 200ms")
        words = f"ip netns exec {host} taskset -c {rank % (os.cpu_count() or 1)} env RANK={rank}".split()
        worker = [sys.executable, "-m", "benchmarks.allreduce_overlap", "--worker", "--rounds", str(rounds)]
        processes.append(subprocess.Popen([*words, *VARIABLES, *worker], stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(codes := [process.returncode for process in processes]):
        raise UserError(f"ranks failed with exit codes {codes}")
    found = json.loads(outputs[0].splitlines()[-1])
    row: dict[str, Any] = {"rate_mbit": rate_mbit, "megabytes": found["num_bytes"] / 1e6}
    for name in METHODS:
        pairs = zip(*(found["seconds"][f"{name} {kind}"] for kind in KINDS), strict=True)
        row[name] = vars(median_interval([1000 * (sending - silent) for sending, silent in pairs]))
    return {**row, "ratio": row["overlapped"]["median"] / row["deepspeed"]["median"]}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("allreduce_overlap", __doc__)
    parser.add_argument("--rates_mbit", type=float, nargs="+", default=[500, 1000, 2000], help="link rates in Mbit/s")
    parser.add_argument(
        "--rounds", type=int, default=9, help="timed steps of each method, with and without sending (9)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        _worker(arguments.rounds)
    exit_on_sigterm()
    with shaped_hosts() as hosts:
        rows = [_measure(hosts, rate_mbit, arguments.rounds) for rate_mbit in arguments.rates_mbit]
    title = "Exposed communication in ms: step time with sending gradients minus without; median and interval"
    show(arguments.output, f"{title}\n\n{table(COLUMNS, rows)}", rows)


if __name__ == "__main__":
    run_alone(main)
