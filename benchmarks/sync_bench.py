"""Command: what sending gradients costs beyond the step itself, under DeepSpeed as it is, overlapped here, and torch's DDP.

    python -m benchmarks.sync_bench [--rates_mbit 500 1000 2000] [--compute emulated real] [--output FILE.md]

Two hosts (network namespaces without uplink; root and iproute2 needed) with links shaped to each rate by `tc`; every method
in one process, in turns. The model's parameters are HTSAT-tiny's, scaled down. `emulated`: its layers sleep for a time in
proportion to their FLOPs, which leaves the cores to the communication as a GPU does. `real`: they multiply matrices for as
long, one core a rank, which the communication competes for. Either is 1.5 times one all-reduce of all gradients.
"""

from __future__ import annotations

import argparse
import itertools
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
from clap_ds.config.places import PACKAGE
from clap_ds.config.settings import ClapSettings
from clap_ds.model.clap import ClapModel
from clap_ds.ranks import distributed
from clap_ds.record.clock import seconds
from clap_ds.record.statistics import median_interval

SCALE = 12
"""The emulated model has one parameter for this many of HTSAT-tiny's."""
BUCKET_MB = ClapSettings().gradient_bucket_mb / SCALE
DDP_BUCKET_MB = 25.0 / SCALE
"""torch's default, scaled like the model."""
COMPUTE_PER_ALLREDUCE = 1.5
METHODS = {"deepspeed": "DeepSpeed as it is", "overlapped": "overlapped", "ddp": "torch DDP"}
KINDS = ("sending", "silent")
EXPOSED = (
    f"{METHODS[each]} {{{each}[exposed_ms]:.0f}} [{{{each}[low]:.0f}}, {{{each}[high]:.0f}}]" for each in METHODS
)
COLUMNS = (
    "compute {compute} | link, Mbit/s {rate_mbit:g} | gradients, MB {megabytes:.1f}"
    " | step without sending {overlapped[silent_step_ms]:.0f}"
    f" | {' | '.join(EXPOSED)} | overlapped / DeepSpeed {{ratio:.0%}}"
)
SUBNET = "10.98.0"
VARIABLES = (
    *["WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu"],
    *f"MASTER_ADDR={SUBNET}.1 MASTER_PORT=29555 GLOO_SOCKET_IFNAME=eth0".split(),
    f"PYTHONPATH={PACKAGE.parent}",
)
"""What a launcher sets, but for the rank."""
INPUT = torch.ones(1, requires_grad=True)
Step = Callable[[bool], None]
"""A training step; whether gradients are sent."""


class _Layer(torch.autograd.Function):
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
    """HTSAT-tiny + RoBERTa-base by parameter sizes, layer order and shares of the compute, all scaled. `work` spends the
    seconds it is given, in all `forward_s` in a forward pass and twice that in a backward pass."""

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
        for weight, forward_s in zip(self.weights, self.seconds, strict=True):
            x = _Layer.apply(x, weight, self.work, forward_s)
        return x.sum()


def _matrix_products() -> Callable[[float], object]:
    """Work that computes for so many seconds where nothing else does."""
    a = torch.rand(256, 256)
    once_s = _seconds(lambda: [a @ a for _ in range(1000)]) / 1000
    return lambda seconds: [a @ a for _ in range(round(seconds / once_s))]


def _step_by(method: str, model: nn.Module) -> Step:
    if method == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=DDP_BUCKET_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def ddp_step(sending: bool) -> None:
            with nullcontext() if sending else ddp.no_sync():
                ddp(INPUT).backward()
            optimizer.step()
            optimizer.zero_grad()

        return ddp_step

    import deepspeed

    from clap_ds.engine.gradient_sync import GradientSync

    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 1e-6}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sync = GradientSync(engine, overlapped=method == "overlapped", bucket_mb=BUCKET_MB)

    def step(sending: bool) -> None:
        with nullcontext() if sending else sync.off():
            engine.backward(engine(INPUT))
        engine.step()

    return step


def _seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds an action takes all ranks together; the same number on every rank."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        times.append(seconds(lambda: (action(), dist.barrier()), torch.device("cpu")))
    median = torch.tensor(median_interval(times).median)
    dist.broadcast(median, src=0)
    return float(median)


def _worker(compute: str, rounds: int) -> None:
    """One rank: seconds of steps with and without sending, by method, printed by rank 0 as JSON."""
    distributed.initialize(distributed.Ranks.from_environment(), compile_cpu_collective=False)
    gradients = torch.cat([weight.detach() for weight in EmulatedModel().parameters()])
    dist.all_reduce(gradients)
    forward_s = COMPUTE_PER_ALLREDUCE / 3 * _seconds(lambda: dist.all_reduce(gradients))
    work = time.sleep if compute == "emulated" else _matrix_products()
    actions = {}
    for name in METHODS:
        step = _step_by(name, EmulatedModel(work, forward_s))
        for _ in range(3):
            step(True)
        for kind in KINDS:
            actions[f"{name} {kind}"] = partial(_seconds, partial(step, kind == "sending"), repeats=1)
    found = {"num_bytes": gradients.nbytes, "seconds": in_turns(actions, rounds)}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    distributed.leave(0)


@contextmanager
def shaped_hosts() -> Iterator[list[str]]:
    """Names of two namespaces, each with one interface `eth0`, for the length of a `with` block. A UserError where there is no
    root or no iproute2, or the kernel refuses."""
    if os.geteuid() != 0:
        raise UserError("network namespaces need root: run this command as root, for example under sudo")
    if not (shutil.which("ip") and shutil.which("tc")):
        raise UserError("ip or tc is missing: install the package iproute2")
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


def shape(hosts: Sequence[str], rate_mbit: float) -> None:
    """Let every host send at `rate_mbit`."""
    for host in hosts:
        _run(f"tc -n {host} qdisc replace dev eth0 root tbf rate {rate_mbit}mbit burst 512kbit latency 200ms")


def run_ranks(hosts: Sequence[str], command: Sequence[str]) -> str:
    """Run a rank on each host, pinned to a core, with the launcher's variables set; rank 0's standard output, or a UserError
    where a rank failed."""
    processes = []
    for rank, host in enumerate(hosts):
        words = f"ip netns exec {host} taskset -c {rank % (os.cpu_count() or 1)} env RANK={rank}".split()
        processes.append(subprocess.Popen([*words, *VARIABLES, *command], stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        if process.returncode:
            raise UserError(f"rank {rank} ended with exit code {process.returncode}")
    return outputs[0]


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{command}: {done.stderr.strip()}")


def _measure(hosts: Sequence[str], compute: str, rate_mbit: float, rounds: int) -> dict[str, Any]:
    """Run all methods on two hosts at one rate; each one's exposed milliseconds with an interval."""
    shape(hosts, rate_mbit)
    worker = [sys.executable, "-m", "benchmarks.sync_bench", "--worker", "--compute", compute, "--rounds", str(rounds)]
    found = json.loads(run_ranks(hosts, worker).splitlines()[-1])
    row: dict[str, Any] = {"compute": compute, "rate_mbit": rate_mbit, "megabytes": found["num_bytes"] / 1e6}
    for name in METHODS:
        sending, silent = ([1000 * each for each in found["seconds"][f"{name} {kind}"]] for kind in KINDS)
        exposed = median_interval([a - b for a, b in zip(sending, silent, strict=True)])
        row[name] = {"step_ms": median_interval(sending).median, "silent_step_ms": median_interval(silent).median}
        row[name] |= {"exposed_ms": exposed.median, "low": exposed.low, "high": exposed.high}
        row["interval"] = exposed.label("rounds")
    return {**row, "ratio": row["overlapped"]["exposed_ms"] / row["deepspeed"]["exposed_ms"]}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("sync_bench", __doc__)
    parser.add_argument("--rates_mbit", type=float, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--compute", nargs="+", choices=("emulated", "real"), default=["emulated", "real"])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every method, with and without sending")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        _worker(arguments.compute[0], arguments.rounds)
    exit_on_sigterm()
    with shaped_hosts() as hosts:
        runs = itertools.product(arguments.compute, arguments.rates_mbit)
        rows = [_measure(hosts, *each, arguments.rounds) for each in runs]
    title = (
        "Exposed communication: a step that sends its gradients less one that keeps them; "
        f"median [{rows[0]['interval']}], ms"
    )
    show(arguments.output, f"{title}\n\n{table(COLUMNS, rows)}", rows)


if __name__ == "__main__":
    run_alone(main)
