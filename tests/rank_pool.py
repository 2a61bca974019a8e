"""Keep a pool of rank processes with a process group for the whole test run."""

import os
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from clap_ds.distributed.hostfile import free_port
from tests.processes import TIMEOUT_S, launcher_variables, warm_context

__all__ = ["RankPool", "free_port", "in_group_of"]


class RankPool:
    """Start `world_size` processes that run a function together and return each rank's result.

    Args:
        gpu: make GPUs visible; such processes are spawned, as the usual parent sees none.
        grouped: join them with DeepSpeed; otherwise `in_group_of` joins some for one call, without
          DeepSpeed.
    """

    def __init__(self, world_size: int, *, gpu: bool = False, grouped: bool = True) -> None:
        port = free_port()
        context = get_context("spawn") if gpu else warm_context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            pool_end, rank_end = context.Pipe()
            arguments = (rank_end, rank, world_size, port, gpu, grouped)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(pool_end)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return results of `function(*arguments)` by rank; re-raise a rank's exception with its
        traceback."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        tracebacks = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} didn't respond within {TIMEOUT_S} s"
            result, traceback_text = pipe.recv()
            results.append(result)
            if traceback_text:
                tracebacks.append(f"rank {rank}:\n{traceback_text}")
        assert not tracebacks, "\n".join(tracebacks)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(
    pipe: Connection, rank: int, world_size: int, port: int, gpu: bool, grouped: bool
) -> None:
    """Run the functions that arrive, and send each result or traceback. A rank's main function."""
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(launcher_variables(rank, world_size, port))
    if grouped:
        from clap_ds.distributed.init import Ranks
        from clap_ds.distributed.process_group import initialize

        initialize(Ranks.from_environment())
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((function(*arguments), ""))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def in_group_of(world_size: int, store: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function` with a gloo group on the first `world_size` ranks of an ungrouped pool; return
    None on the others.

    Args:
        store: a new file for the rendezvous.
    """
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if rank >= world_size:
        return None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()
