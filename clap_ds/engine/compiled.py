"""torch.compile over a model, and what it made of it: graphs, graph breaks and recompilations, for the run's summary.

The model is written so that its parts compile whole (`clap.compile`). The loss's element-wise functions always are compiled on
a GPU, where they are bound by memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import CodeType
from typing import Any, Literal, TypeVar

import torch

from clap_ds.model.clap import ClapModel
from clap_ds.ranks import watch
from clap_ds.ranks.agreement import rank

Compile = Literal["off", "towers"]
T = TypeVar("T")


def compile_model(
    model: ClapModel, what: Compile, *, cuda_graphs: bool = False, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile in place, so that parameter names stay.

    Args:
        what: `towers`: HTSAT and RoBERTa, each a graph with its backward pass, and the mel front end. What talks to other ranks
            stays outside: the projections, behind which features start to be gathered, the loss, and torch's reducer, which
            gets a tower's gradients when that tower's backward pass ends and sends them under the other's.
        cuda_graphs: record and replay the towers, on CUDA. What a replay gave, gradients too, is overwritten by replays after
            the next `torch.compiler.cudagraph_mark_step_begin`. The front end is not recorded: waveforms would be copied into
            the recording's own memory, eight times what becomes of them.
        backend: torch.compile's.
    """
    if what == "off":
        return
    from torch._dynamo import config

    # With the reducer attached, Dynamo would split the towers at its buckets, and fail an assertion where those are below 1 MB.
    config.optimize_ddp = False
    _note_compilations()
    model.mel.compile(backend=backend)
    for tower in (model.audio, model.text):
        tower.compile(backend=backend, mode="reduce-overhead" if cuda_graphs else None)


def compiled_on_gpu(function: Callable[..., T], *arguments: Any) -> T:
    """`function` of `arguments`, none of which it changes: compiled where the first of them, a tensor, is on a GPU. Where that
    can't be done (no Triton, no C compiler), which rank 0 says once, it runs as it is."""
    return _compiled(function)(*arguments) if arguments[0].is_cuda else function(*arguments)


_beside_the_model: set[CodeType] = set()


@cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    from torch._dynamo.exc import TorchDynamoException

    _note_compilations()
    _beside_the_model.add(function.__code__)
    run = torch.compile(function)

    def run_or_fall_back(*arguments: Any) -> T:
        nonlocal run
        try:
            return run(*arguments)
        except TorchDynamoException as error:
            run = function
            if rank() == 0:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                print(f"warning: the loss runs slower, as {function.__name__} can't be compiled: {reason}", flush=True)
            return function(*arguments)

    return run_or_fall_back


_noted = ExitStack()


def _note_compilations() -> None:
    """Have this rank say that it compiles: a step in which it does, the first or one of other shapes, may take minutes."""
    from torch._dynamo.callback import callback_handler

    if _begin_note not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin_note)
        callback_handler.register_end_callback(_end_note)


def _begin_note(*_: Any) -> None:
    _noted.enter_context(watch.doing("compiling"))


def _end_note(*_: Any) -> None:
    _noted.close()


def compile_statistics() -> dict[str, Any]:
    """Of the model since the process started: graphs compiled, graph breaks with their reasons, and how many graphs were
    compilations anew of code that had been compiled for other shapes or values."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    codes = {(code.co_filename, code.co_name) for code in _beside_the_model}
    model: list[Any] = []
    beside: list[Any] = []
    for metrics in get_compilation_metrics():
        (beside if (metrics.co_filename, metrics.co_name) in codes else model).append(metrics)
    anew = [metrics for metrics in model if int(str(metrics.compile_id or "0/0").split("/")[-1][0]) > 0]
    breaks = {str(reason).splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    return {
        "num_graphs": counters["stats"]["unique_graphs"] - sum(metrics.fail_type is None for metrics in beside),
        "num_graph_breaks": sum(breaks.values()),
        "graph_breaks": breaks,
        "num_recompilations": len(anew),
        "torch": torch.__version__,
    }
