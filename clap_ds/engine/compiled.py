"""torch.compile over a model, which is written so that its parts compile whole (`clap.compile`), and over the loss's
element-wise functions, always on a GPU, where they are bound by memory traffic.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, TypeVar

import torch

from clap_ds.config.places import code_folder
from clap_ds.model.clap import ClapModel
from clap_ds.ranks import watch
from clap_ds.ranks.agreement import rank

T = TypeVar("T")


def compile_towers(model: ClapModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile HTSAT and RoBERTa, each a graph with its backward pass, and the mel front end, in place, so that parameter names
    stay.

    What talks to other ranks stays outside: the projections, behind which features start to be gathered, the loss, and torch's
    reducer, which gets a tower's gradients when that tower's backward pass ends and sends them under the other's.
    """
    from torch._dynamo import config

    # With the reducer attached, Dynamo would split the towers at its buckets, and fail an assertion where those are below 1 MB.
    config.optimize_ddp = False
    _note_compilations()
    for part in (model.mel, model.audio, model.text):
        part.compile(backend=backend)


def compiled_on_gpu(function: Callable[..., T], *arguments: Any) -> T:
    """`function` of `arguments`, none of which it changes: compiled where the first of them, a tensor, is on a GPU. Where that
    can't be done (no Triton, no C compiler), which rank 0 says once, it runs as it is."""
    return _compiled(function)(*arguments) if arguments[0].is_cuda else function(*arguments)


@cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    from torch._dynamo.exc import TorchDynamoException

    _note_compilations()
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
    """Have this rank say that it compiles: a step in which it does, the first or one of other shapes, may take minutes. What
    comes of it is kept where nobody else can write, not in /tmp under the user's name, torch's default."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        try:
            folder = str(code_folder("inductor"))
        except OSError:
            folder = tempfile.mkdtemp()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    from torch._dynamo.callback import callback_handler

    if _begin_note not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin_note)
        callback_handler.register_end_callback(_end_note)


def _begin_note(*_: Any) -> None:
    _noted.enter_context(watch.doing("compiling"))


def _end_note(*_: Any) -> None:
    _noted.close()
