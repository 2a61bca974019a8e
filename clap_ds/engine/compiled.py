"""torch.compile over a model, which is written so that its parts compile whole (`clap.compile`), and over the loss's
element-wise functions, always on a GPU, where they are bound by memory traffic.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import nn

from clap_ds.config.places import code_folder
from clap_ds.data.batch import Batch
from clap_ds.ranks import watch
from clap_ds.ranks.agreement import gather, rank
from clap_ds.record.schema import Summary

T = TypeVar("T")

PARTS = {"mel": "the mel front end", "audio": "the audio tower", "text": "the text tower"}
MODES = {"towers": None, "towers-max-autotune": "max-autotune-no-cudagraphs"}
"""torch.compile's, by `clap.compile`."""


def what_to_compile(asked: str, device: torch.device) -> str:
    """What `clap.compile` stands for on a device: `off` or one of `MODES`."""
    return ("towers" if device.type == "cuda" else "off") if asked == "auto" else asked


def compile_towers(
    engine: Any, batch: Batch, what: str, *, cached: bool, backend: str | Callable[..., Any] = "inductor"
) -> Summary:
    """Compile HTSAT and RoBERTa, each a graph with its backward pass, and the mel front end, in place, so that parameter names
    stay. A collective, before the first step.

    What talks to other ranks stays outside: the projections, behind which features start to be gathered, the loss, and torch's
    reducer, which gets a tower's gradients when that tower's backward pass ends and sends them under the other's.

    Each part goes forward and backward here as it will in a step, and leaves nothing behind: torch compiles a backward graph when
    it first runs, and in a step a failure there would leave gradients half sent. What fails on one rank runs uncompiled on all.

    Args:
        engine: DeepSpeed's, around a `ClapModel`.
        batch: as steps will have them.
        what: of `MODES`.
        cached: a step's first pass is without gradients (`clap_ds.engine.cached_step`).
    """
    from torch._dynamo import config

    # With the reducer attached, Dynamo would split the towers at its buckets, and fail an assertion where those are below 1 MB.
    config.optimize_ddp = False
    _note_compilations()
    model, problems, began_s = engine.module, dict[str, str | None](), time.monotonic()
    statistics = [(buffer, buffer.clone()) for buffer in model.audio.batch_norm.buffers()]
    audio, *text = batch.model_inputs()
    inputs = ({"mel": [audio]} if audio.ndim == 2 else {}) | {"audio": [audio], "text": text}
    devices = [batch.device] if batch.device.type == "cuda" else []
    with watch.doing("compiling"), torch.random.fork_rng(devices), autocast_if_enabled(engine):
        for name, tensors in inputs.items():
            part, part_began_s = model.get_submodule(name), time.monotonic()
            _say(f"compiling {PARTS[name]} …")
            part.compile(backend=backend, mode=MODES[what])
            problems[name] = _problem(part, tensors, cached=cached)
            if problems[name]:
                part._compiled_call_impl = None
            else:
                _say(f"compiled in {time.monotonic() - part_began_s:.0f} s")
            if name == "mel":
                inputs["audio"] = [part(audio)]
        for buffer, value in statistics:
            buffer.copy_(value)
        everyones = gather((problems, time.monotonic() - began_s))
    for name in problems:
        failed = [f"rank {number}: {own[name]}" for number, (own, _) in enumerate(everyones) if own[name]]
        problems[name] = failed[0] if failed else None
        if failed:
            model.get_submodule(name)._compiled_call_impl = None
            _say(f"warning: {PARTS[name]} runs slower, as it can't be compiled: {failed[0]}")
    return Summary(compiled=problems, compile_s=max(seconds for _, seconds in everyones))


def _problem(part: nn.Module, inputs: list[Any], *, cached: bool) -> str | None:
    """Why a part can't be run compiled, forward and backward, in a line; None where it can."""
    trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
    try:
        if cached:
            with torch.no_grad():
                part(*inputs)
        output = part(*inputs)
        if trained:  # not `backward`, which would call torch's reducer
            torch.autograd.grad(output, trained, torch.zeros_like(output))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever type a compiler or a driver has
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """In a line, without Dynamo's words around it."""
    error = getattr(error, "inner_exception", error)
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _say(line: str) -> None:
    if rank() == 0:
        print(line, flush=True)


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
            _say(f"warning: the loss runs slower, as {function.__name__} can't be compiled: {_reason(error)}")
            return function(*arguments)

    return run_or_fall_back


def keep_code(root: Path | None = None) -> None:
    """Have Inductor and Triton keep what they compile where nobody else can write, in `root` if possible, so that the next run
    there finds it from any node: not in /tmp under the user's name, Inductor's default."""
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        if variable not in os.environ:
            try:
                os.environ[variable] = str(code_folder(name, root))
            except OSError:
                os.environ[variable] = tempfile.mkdtemp()


_noted = ExitStack()


def _note_compilations() -> None:
    """Have this rank say that it compiles: a step in which it does, as one of other shapes, may take minutes."""
    keep_code()
    from torch._dynamo.callback import callback_handler

    if _begin_note not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin_note)
        callback_handler.register_end_callback(_end_note)


def _begin_note(*_: Any) -> None:
    _noted.enter_context(watch.doing("compiling"))


def _end_note(*_: Any) -> None:
    _noted.close()
