"""torch.compile over a model, and what it made of it: graphs, graph breaks and recompilations, for the run's summary.

Which parts are compiled is the run's choice (`clap.compile`); the model itself is written so that they compile whole.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import torch

from clap_ds.dist import progress
from clap_ds.model.clap import ClapModel

Compile = Literal["off", "towers", "step"]


def compile_model(model: ClapModel, what: Compile, *, cuda_graphs: bool = False, backend: str = "inductor") -> None:
    """Compile in place, so that parameter names stay.

    Args:
        what: `towers`: HTSAT and RoBERTa, each a graph; `step`: the whole forward pass from waveforms to embeddings as one
            graph, and with it its backward pass. The loss, which talks to other ranks, stays outside.
        cuda_graphs: record and replay them, on CUDA. Features are then overwritten by the next forward pass, before which
            `torch.compiler.cudagraph_mark_step_begin` must say that they are done with.
        backend: torch.compile's.
    """
    if what != "off":
        _note_compilations()
    mode = "reduce-overhead" if cuda_graphs else None
    if what == "towers":
        model.audio.compile(backend=backend, mode=mode)
        model.text.compile(backend=backend, mode=mode)
    elif what == "step":
        model.compile(backend=backend, mode=mode)


_noted = ExitStack()


def _note_compilations() -> None:
    """Have this rank say that it compiles: a step in which it does, the first or one of other shapes, may take minutes."""
    from torch._dynamo.callback import callback_handler

    if _begin_note not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin_note)
        callback_handler.register_end_callback(_end_note)


def _begin_note(*_: Any) -> None:
    _noted.enter_context(progress.doing("compiling"))


def _end_note(*_: Any) -> None:
    _noted.close()


def compile_statistics() -> dict[str, Any]:
    """Since the process started: graphs compiled, graph breaks with their reasons, and how many graphs were compilations anew
    of code that had been compiled for other shapes or values."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    anew = [
        metrics for metrics in get_compilation_metrics() if int(str(metrics.compile_id or "0/0").split("/")[-1][0]) > 0
    ]
    breaks = {str(reason).splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    return {
        "num_graphs": counters["stats"]["unique_graphs"],
        "num_graph_breaks": sum(breaks.values()),
        "graph_breaks": breaks,
        "num_recompilations": len(anew),
        "torch": torch.__version__,
    }
