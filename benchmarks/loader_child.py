"""One process of `benchmarks.loader`: loads a rank's shards with the package of a checkout, as long as it is told to.

    python benchmarks/loader_child.py CHECKOUT RUN.json threads|processes WORKERS

Reads lines `MODE SECONDS` and answers each with a line of JSON. `load`: batches in host memory, one after the other. `beside`:
small operations of torch, as a training process launches them, with a batch taken now and then, so that workers have always
work to do; the rate is that of the operations. Only what both checkouts have is used of the package.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

OPERATIONS = 500
AHEAD = 3  # batches that workers may have ready, which aren't counted


class ThreadLoader:
    """In place of `clap_ds.data.workers.Loader`: every reader in a thread of this process."""

    def __init__(self, dataset: Any, *, num_workers: int, **_: Any) -> None:
        # With the one that is being put, no more than a DataLoader asks for: readers use their memory again.
        self._queues: list[queue.Queue[Any]] = [queue.Queue(1) for _ in dataset._readers]
        self._turns = itertools.cycle(self._queues)
        for reader, pieces in zip(dataset._readers, self._queues, strict=True):
            threading.Thread(target=self._read, args=(reader, pieces), daemon=True).start()

    def _read(self, reader: Any, pieces: queue.Queue[Any]) -> None:
        for piece in reader.pieces():
            pieces.put(piece)

    def __next__(self) -> Any:
        return next(self._turns).get()

    def close(self) -> None:
        pass


def memory_mb() -> float:
    """Proportional set size of this process and its children, in MB."""
    import psutil

    here = psutil.Process()
    return sum(each.memory_full_info().pss for each in (here, *here.children(recursive=True))) / 1e6


def main(checkout: str, config: str, way: str, workers: str) -> None:
    sys.path[0] = checkout
    import torch

    from clap_ds.config.settings import load_run
    from clap_ds.data import shards
    from clap_ds.data.batch import BatchSpec
    from clap_ds.dist.distributed import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    run: Any = load_run(Path(config))
    cpu = torch.device("cpu")
    if way == "threads":
        shards.Loader = ThreadLoader  # type: ignore[assignment,misc]
    data = run.clap.data.model_copy(update={"num_workers": int(workers)})
    spec = BatchSpec(run.clap.preset(), run.clap.text_tokens, run.micro_batch, 0, 1, 0, cpu)
    pieces: Any = shards.ShardPieces(data, spec) if int(workers) or way == "processes" else None

    batches: dict[torch.dtype, torch.Tensor] = {}

    def load() -> int:
        """To one piece of host memory, from where a GPU would fetch it and convert it."""
        rows = [piece.tensors()[0] for piece in next(pieces)]
        batch = batches.get(rows[0].dtype)
        if batch is None:
            batch = batches[rows[0].dtype] = torch.empty(run.micro_batch, *rows[0].shape[1:], dtype=rows[0].dtype)
        torch.cat(rows, out=batch)
        return run.micro_batch

    one = torch.zeros(1)

    def launch() -> int:
        for _ in range(OPERATIONS):
            one.add_(1)
        return OPERATIONS

    if pieces is not None:
        load()
    print("ready", flush=True)
    for line in sys.stdin:
        mode, limit = line.split()
        for _ in range(AHEAD if mode == "load" and int(workers) else 0):
            load()
        done, size, until = 0, getattr(pieces, "encoded_bytes", 0), time.perf_counter() + float(limit)
        spent = 0.0
        while time.perf_counter() < until:
            if mode == "beside" and pieces is not None:
                load()
            began = time.perf_counter()
            done += launch() if mode == "beside" else load()
            spent += time.perf_counter() - began
        answer = {"per_s": done / spent, "mb_per_s": (getattr(pieces, "encoded_bytes", 0) - size) / spent / 1e6}
        answer |= {"done": done, "memory_mb": memory_mb(), "descriptors": len(os.listdir("/proc/self/fd"))}
        print(json.dumps(answer), flush=True)
    if pieces is not None:
        pieces.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
