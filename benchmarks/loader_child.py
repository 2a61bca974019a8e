"""One process of `benchmarks.loader`: loads a rank's shards with the package of a checkout, as long as it is told to.

    python benchmarks/loader_child.py CHECKOUT RUN.json WORKERS

Reads lines of seconds, loads batches into host memory for so long, one after the other, and answers each with a line of JSON.
Only what both checkouts have is used of the package.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

AHEAD = 3  # batches that workers may have ready, which aren't counted


def main(checkout: str, config: str, workers: str) -> None:
    sys.path[0] = checkout
    import torch

    from clap_ds.config.settings import load_run
    from clap_ds.data import shards
    from clap_ds.data.batch import BatchSpec
    from clap_ds.ranks.distributed import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    run: Any = load_run(Path(config))
    cpu = torch.device("cpu")
    data = run.clap.data.model_copy(update={"num_workers": int(workers)})
    spec = BatchSpec(run.clap.preset(), run.clap.text_tokens, run.micro_batch, 0, 1, 0, cpu)
    pieces: Any = shards.ShardPieces(data, spec)
    batches: dict[torch.dtype, torch.Tensor] = {}

    def load() -> int:
        """To one piece of host memory, from where a GPU would fetch it and convert it."""
        rows = [piece.tensors()[0] for piece in next(pieces)]
        batch = batches.get(rows[0].dtype)
        if batch is None:
            batch = batches[rows[0].dtype] = torch.empty(run.micro_batch, *rows[0].shape[1:], dtype=rows[0].dtype)
        torch.cat(rows, out=batch)
        return run.micro_batch

    load()
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(AHEAD if int(workers) else 0):
            load()
        done, size, began = 0, getattr(pieces, "encoded_bytes", 0), time.perf_counter()
        while (spent := time.perf_counter() - began) < float(line):
            done += load()
        answer = {"per_s": done / spent, "mb_per_s": (getattr(pieces, "encoded_bytes", 0) - size) / spent / 1e6}
        print(json.dumps(answer), flush=True)
    pieces.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
