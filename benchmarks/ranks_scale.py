"""Command: what ranks say to each other outside the model's own collectives, and how that grows with their number.

    python -m benchmarks.ranks_scale [--ranks 8 16 32 64 128] [--output FILE.md]

Light processes, forked from this one, call the project's own functions over gloo on the loopback. They share this machine's
cores: so the processor's time is measured, too, which doesn't count the wait for a core as the clock's does.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import make_parser, show, table
from clap_ds.config.errors import run_alone
from clap_ds.engine.cached_step import random_state
from clap_ds.ranks.agreement import agree, gather, gather_tensor, on_first
from clap_ds.ranks.distributed import Ranks, initialize
from clap_ds.ranks.hostfile import free_port
from clap_ds.training.stop import StopRequest

LAWS: dict[str, Callable[[Any], Any]] = {"log2 N": np.log2, "N": np.asarray, "N²": np.square}
COLLECTIVES = ("gather", "broadcast", "all_reduce", "all_gather", "barrier")
STEP_S = 0.15
TIMES = (
    "rank 0's main thread waits",
    "others' waits",
    "rank 0's works",
    "others' works",
    "rank 0 works",
    "others work",
)
COLUMNS = "call {call} | ranks {ranks} | collectives {collectives} | bytes of a rank {bytes:,} | "
COLUMNS += " | ".join(f"{name}, ms {{{name}:.2f}}" for name in TIMES)
FITTED = "call {call} | time {time} | grows as a + b · {law} | unexplained {left:.0%}"
FITTED += " | ms at 512 ranks {at_512:.2f} | at 4,096 {at_4096:.2f}"


def fit(ranks: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """The law that, as a + b · law with b ≥ 0, leaves least of the values' variance, and what it gives at 512 and 4,096."""
    y, found = np.array(values), []
    for name, law in LAWS.items():
        x = law(np.array(ranks, float))
        slope = max(0.0, np.cov(x, y)[0, 1] / x.var(ddof=1))
        of = lambda n, slope=slope, law=law, x=x: y.mean() + slope * (law(n) - x.mean())  # noqa: E731
        left = float((y - of(np.array(ranks, float))).var() / (y.var() or 1.0))
        found.append({"law": name, "left": left, "at_512": float(of(512.0)), "at_4096": float(of(4096.0))})
    return min(found, key=lambda each: each["left"])


def _rank(rank: int, world_size: int, port: int, repeats: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size}.items():
        os.environ.update({name: str(value), f"LOCAL_{name}": str(value)})
    ranks, row, number = Ranks(rank, world_size, rank, world_size), torch.zeros(104).double(), torch.zeros(1)
    state, pause, measured = random_state(torch.device("cpu")), partial(time.sleep, STEP_S), partial(_measured, repeats)
    found = {"start: meeting": _measured(0, lambda: initialize(ranks, compile_cpu_collective=False))}
    found["start: first agreement"] = _measured(0, lambda: agree(None))
    found["start: agreement"] = measured(lambda: agree(None))
    found["start: rank 0's word"] = measured(lambda: on_first(lambda: "/runs/label"))
    with StopRequest() as stop:
        found["step: stop.ask"] = measured(lambda: stop.ask(), [], [pause, stop.wait])
        found["step: stop.wait"] = measured(lambda: stop.wait(), [stop.ask, pause])
    found["step: an all-reduce in place of both"] = measured(lambda: dist.all_reduce(number))
    found["window: log's rows"] = measured(lambda: gather_tensor(row))
    found["checkpoint: random states"] = measured(lambda: gather(state))
    dist.barrier()
    pipe.send(found)
    pipe.recv()  # the store is rank 0's, which leaves with the others
    os._exit(0)


def _measured(
    repeats: int, call: Callable[[], Any], before: Sequence[Any] = (), after: Sequence[Any] = ()
) -> list[float]:
    """Milliseconds that the main thread waits and works, and this process with what is before and after, medians over repeats
    after a first one; collectives, and bytes of this rank. With 0 repeats it is the first one."""
    sent, rows = list[int](), []
    plain = {name: getattr(dist, name) for name in COLLECTIVES}
    counted = lambda name, *own, **how: (sent.append(own[0].nbytes), plain[name](*own, **how))[1]  # type: ignore # noqa: E731
    patched: Any = {name: partial(counted, name) for name in COLLECTIVES}
    for _ in range(1 + repeats):
        if repeats:
            dist.barrier()
        cpu_s = time.process_time()
        _ = [each() for each in before]
        with mock.patch.multiple(dist, **patched), mock.patch.multiple(dist.distributed_c10d, **patched):
            sent.clear()
            wall_s, own_s = time.perf_counter(), time.thread_time()
            call()
            times = [time.perf_counter() - wall_s, time.thread_time() - own_s]
        num_sent, num_bytes = len(sent), sum(sent)
        _ = [each() for each in after]
        rows.append([1e3 * each for each in (*times, time.process_time() - cpu_s)])
    return [*np.median(rows[bool(repeats) :], axis=0).tolist(), num_sent, num_bytes]


def _rows(world_size: int, repeats: int) -> list[dict[str, Any]]:
    """Start the ranks; a row for each call."""
    context, port = multiprocessing.get_context("fork"), free_port()
    pipes = [context.Pipe() for _ in range(world_size)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(target=_rank, args=(rank, world_size, port, repeats, theirs), daemon=True).start()
    first, *others = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(None)
    rows = []
    for call, (*ours, num_sent, _) in first.items():
        *theirs, _, num_bytes = np.median([each[call] for each in others], axis=0).tolist()
        times = [each for pair in zip(ours, theirs, strict=True) for each in pair]
        row = {"call": call, "ranks": world_size, "collectives": num_sent, "bytes": int(num_bytes)}
        rows.append(row | dict(zip(TIMES, times, strict=True)))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("ranks_scale", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [row for world_size in arguments.ranks for row in _rows(world_size, arguments.repeats)]
    fits = []
    for call in dict.fromkeys(row["call"] for row in rows):
        for name in TIMES:
            values = [row[name] for row in rows if row["call"] == call]
            fits.append({"call": call, "time": name, **fit(arguments.ranks, values)})
    show(arguments.output, f"{table(COLUMNS, rows)}\n\n{table(FITTED, fits)}", {"rows": rows, "fits": fits})


if __name__ == "__main__":
    run_alone(main)
