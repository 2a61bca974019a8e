"""Compile a model's parts with torch.compile (`clap.compile`) and, on a GPU, the loss's
element-wise functions."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clap_ds.data.batch import Batch
from clap_ds.distributed import watchdog
from clap_ds.distributed.collectives import rank, reduce_on_rank0, world_size
from clap_ds.engine.deepspeed_compat import autocast_if_enabled
from clap_ds.engine.grad_cache import preserve_statistics
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.htsat import HTSAT
from clap_ds.run_records.schema import Summary
from clap_ds.utils.errors import first_line
from clap_ds.utils.paths import cache_folder

T = TypeVar("T")


def resolve_compile_mode(setting: str, device: torch.device) -> str:
    """Return `clap.compile`, with `auto` resolved for the device."""
    if setting != "auto":
        return setting
    return "towers" if device.type == "cuda" else "off"


def compile_towers(
    engine: Any,
    batch: Batch,
    compile_mode: str,
    *,
    cached: bool,
    local_rank: int = 0,
    backend: str | Callable[..., Any] = "inductor",
) -> Summary:
    """Compile towers and mel front end of DeepSpeed's engine in place, before the first step, for
    such a batch. A collective.

    Each part runs forward (`cached`: also without gradients) and backward, as a failure in a step
    would leave gradients half sent. Each tower and its backward pass are one graph; on several
    ranks HTSAT is two. A part that fails on one rank runs uncompiled on all. On each host local
    rank 0 compiles first, so that the others find its kernels in the cache. Rows of packed captions
    may have any length.
    """
    # With the reducer attached, Dynamo would split the towers at its buckets, and fail an assertion
    # if those are below 1 MB.
    torch._dynamo.config.optimize_ddp = False
    _report_compilations_to_watchdog()
    mode = "max-autotune-no-cudagraphs" if compile_mode == "towers-max-autotune" else None
    model = engine.module
    audio, *text = batch.model_inputs()
    if batch.packed is not None:
        row, packing = batch.packed
        for tensor in (row, packing.cu_seqlens):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    if isinstance(model.audio, HTSAT):
        model.audio.splits_graph = world_size() > 1
    # Stored log-mel features need no front end.
    front_end_parts = model.front_end_parts if audio.ndim == 2 else ()
    problems: dict[str, str | None] = {}
    began_s = time.monotonic()
    # On a host, others find what local rank 0 compiled in the cache. LOCAL_RANK in the environment
    # isn't it: it is the device's number, 0 on all ranks that see one GPU each.
    is_first = local_rank == 0
    with (
        watchdog.activity("compiling"),
        preserve_rng_and_bn(model, batch.device),
        autocast_if_enabled(engine),
    ):
        # Finds that memory is too small in a second, not after minutes of compiling.
        run_eager(engine, batch)
        for name in (*front_end_parts, "audio", "text"):
            _print_on_rank0(f"compiling {name} …")
            part = model.get_submodule(name)
            inputs: Sequence[Any] = [audio]
            if name == "text":
                inputs = model.text_inputs(*text)
            elif name == "audio":
                inputs = [model.front_end(audio)]
            part.compile(backend=backend, mode=mode)
            attempt = partial(_try, part, inputs, cached=cached)
            problem = first_error(attempt, is_first) or first_error(attempt, not is_first)
            if problem:
                # As if `compile` had never been called.
                part._compiled_call_impl = None
                _print_on_rank0(f"warning: {name} can't be compiled and runs slower: {problem}")
            problems[name] = problem
    compile_s = time.monotonic() - began_s
    _print_on_rank0(f"compiled in {compile_s:.0f} s")
    return Summary(compiled=problems, compile_s=compile_s)


def _try(part: nn.Module, inputs: Sequence[Any], *, cached: bool) -> None:
    """Run a part forward and backward."""
    if cached:
        # GradCache runs each tower twice, first without gradients: another graph.
        with torch.no_grad():
            part(*inputs)
    _backward([part(*inputs)], part)


@contextmanager
def preserve_rng_and_bn(model: ContrastiveModel, device: torch.device) -> Iterator[None]:
    """Restore random states and the batch norm's statistics afterwards."""
    gpus = [device] if device.type == "cuda" else []
    with preserve_statistics(model), torch.random.fork_rng(gpus):
        yield


def run_eager(engine: Any, batch: Batch) -> None:
    """Run both towers of DeepSpeed's engine forward and backward on a whole batch, without effects
    on gradients."""
    model = engine.module
    audio, *text = batch.model_inputs()
    with autocast_if_enabled(engine):
        outputs = [model.audio(model.front_end(audio)), model.text(*model.text_inputs(*text))]
        _backward(outputs, model.audio, model.text)


def _backward(outputs: list[Tensor], *parts: nn.Module) -> None:
    """Compute gradients of the parts' parameters and discard them; no hook of torch's reducer is
    called."""
    outputs = [output for output in outputs if output.requires_grad]
    trained = [
        parameter for parameter in nn.ModuleList(parts).parameters() if parameter.requires_grad
    ]
    # Everything may be frozen.
    if trained:
        torch.autograd.grad(outputs, trained, [torch.zeros_like(output) for output in outputs])


def first_error(action: Callable[[], object], takes_part: bool = True) -> str | None:
    """Return why an action fails on the first rank where it does, in one line, or None if it
    succeeds on all that take part. A collective. Raises torch.OutOfMemoryError."""
    problem = None
    try:
        if takes_part:
            action()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Compilers and drivers raise any type.
        problem = f"rank {rank()}: {reason_of(error)}"
    # All ranks learn of the first rank's problem.
    return reduce_on_rank0(problem, lambda problems: next(filter(None, problems), None))


def reason_of(error: Exception) -> str:
    """Return the error's first line, without Dynamo's message around it."""
    # Dynamo wraps a backend's error in its own.
    return first_line(getattr(error, "inner_exception", error))


def _print_on_rank0(line: str) -> None:
    if rank() == 0:
        print(line, flush=True)


def compiled_on_gpu(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function that changes none of its arguments: if the first one, a tensor, is on a
    GPU, it runs compiled.

    Without Triton or a C compiler it runs uncompiled, and rank 0 warns once.
    """
    gpu_function: Callable[..., T] | None = None

    @wraps(function)
    def call(*arguments: Any) -> T:
        nonlocal gpu_function
        if not arguments[0].is_cuda:
            return function(*arguments)
        if gpu_function is None:
            _report_compilations_to_watchdog()
            gpu_function = torch.compile(function)
        try:
            return gpu_function(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = reason_of(error)
            _print_on_rank0(
                f"warning: {function.__name__} can't be compiled, so the loss runs slower: {reason}"
            )
            gpu_function = function
            return function(*arguments)

    return call


def set_compile_cache() -> None:
    """Set the caches of Inductor and Triton to folders that only this user can write, unlike
    Inductor's default in /tmp. Dynamo's import has already set that default."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        # A folder that the user chose stays.
        if os.environ.get(variable, "") in ("", default_cache_dir()):
            # Without any folder that can be written, theirs says so when it is used.
            with suppress(OSError):
                os.environ[variable] = str(cache_folder(name))


@cache
def _report_compilations_to_watchdog() -> None:
    """Report compilations to the watchdog: a step with new shapes may take minutes."""
    from torch._dynamo.callback import callback_handler

    set_compile_cache()
    # Only the FFT is complex; it runs in torch.
    warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex")
    # Compilations don't overlap in a process.
    activities = ExitStack()
    callback_handler.register_start_callback(
        lambda _: activities.enter_context(watchdog.activity("compiling"))
    )
    callback_handler.register_end_callback(lambda _: activities.close())
