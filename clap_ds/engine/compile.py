"""torch.compile over a model's parts (`clap.compile`), and on a GPU over the loss's element-wise functions."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, TypeVar

import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import nn

from clap_ds.config.paths import code_folder
from clap_ds.data.batch import Batch
from clap_ds.distributed import watchdog
from clap_ds.distributed.collectives import judged, rank
from clap_ds.run_records.metrics_schema import Summary

T = TypeVar("T")

PARTS = {"mel": "the mel front end", "audio": "the audio tower", "text": "the text tower"}


def what_to_compile(asked: str, device: torch.device) -> str:
    """What `clap.compile` stands for on a device, where it is `auto`."""
    return ("towers" if device.type == "cuda" else "off") if asked == "auto" else asked


def compile_towers(
    engine: Any, batch: Batch, what: str, *, cached: bool, backend: str | Callable[..., Any] = "inductor"
) -> Summary:
    """Compile both towers of DeepSpeed's engine, each a graph with its backward pass, and the mel front end, in place, so
    that parameter names stay: before the first step, for batches like this one. A collective.

    Each part goes forward (`cached`: also without gradients) and backward as it will in a step: a failure there would leave
    gradients half sent. What fails on one rank runs uncompiled on all.
    """
    # With the reducer attached, Dynamo would split the towers at its buckets, and fail an assertion where those are below 1 MB.
    torch._dynamo.config.optimize_ddp = False
    _note_compilations()
    mode = "max-autotune-no-cudagraphs" if what == "towers-max-autotune" else None
    model, problems, began_s = engine.module, dict[str, str | None](), time.monotonic()
    statistics = [(buffer, buffer.clone()) for buffer in model.audio.running_statistics()]
    audio, *text = batch.model_inputs()
    devices = [batch.device] if batch.device.type == "cuda" else []
    with watchdog.doing("compiling"), torch.random.fork_rng(devices), autocast_if_enabled(engine):
        for name in PARTS if audio.ndim == 2 else ("audio", "text"):
            _say(f"compiling {PARTS[name]} …")
            part = model.get_submodule(name)
            part.compile(backend=backend, mode=mode)
            inputs = text if name == "text" else [audio]
            problems[name] = judged(problem_of(partial(_try, part, inputs, cached=cached)), first_problem)
            if problems[name]:
                part._compiled_call_impl = None
                _say(f"warning: {PARTS[name]} runs slower, as it can't be compiled: {problems[name]}")
            if name == "mel":
                audio = part(audio)
        for buffer, value in statistics:
            buffer.copy_(value)
    _say(f"compiled in {time.monotonic() - began_s:.0f} s")
    return Summary(compiled=problems, compile_s=time.monotonic() - began_s)


def first_problem(problems: list[str | None]) -> str | None:
    return next((f"rank {number}: {each}" for number, each in enumerate(problems) if each), None)


def _try(part: nn.Module, inputs: list[Any], *, cached: bool) -> None:
    """Pass inputs through a part, forward and backward."""
    if cached:
        with torch.no_grad():
            part(*inputs)
    output = part(*inputs)
    if trained := [parameter for parameter in part.parameters() if parameter.requires_grad]:
        torch.autograd.grad(output, trained, torch.zeros_like(output))  # which calls no hook of torch's reducer


def problem_of(action: Callable[[], object]) -> str | None:
    """Why an action fails, in a line; None where it doesn't, and raises for want of memory."""
    try:
        action()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever type a compiler or a driver has
        return reason_of(error)
    return None


def reason_of(error: Exception) -> str:
    """In a line, without Dynamo's words around it."""
    error = getattr(error, "inner_exception", error)
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _say(line: str) -> None:
    if rank() == 0:
        print(line, flush=True)


_failed = set[Callable[..., Any]]()


def compiled_on_gpu(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that changes none of its arguments, compiled if the first of them, a tensor, is on a GPU.

    Without Triton or a C compiler it runs as it is, and rank 0 warns once.
    """
    if arguments[0].is_cuda and function not in _failed:
        try:
            return _compiled(function)(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            _failed.add(function)
            _say(f"warning: the loss runs slower, as {function.__name__} can't be compiled: {reason_of(error)}")
    return function(*arguments)


@cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    _note_compilations()
    return torch.compile(function)


def keep_code() -> None:
    """Have Inductor and Triton keep what they compile where nobody else can write: not in /tmp, Inductor's
    default, which Dynamo's import has named."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        if os.environ.get(variable, "") in ("", default_cache_dir()):
            try:
                os.environ[variable] = str(code_folder(name))
            except OSError:
                os.environ[variable] = tempfile.mkdtemp()


@cache
def _note_compilations() -> None:
    """Have this rank say that it compiles: a step in which it does, as one of other shapes, may take minutes."""
    from torch._dynamo.callback import callback_handler

    keep_code()
    # The FFT's, which is torch's.
    warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex")
    noted = ExitStack()
    callback_handler.register_start_callback(lambda _: noted.enter_context(watchdog.doing("compiling")))
    callback_handler.register_end_callback(lambda _: noted.close())
