"""Ask Inductor's scheduler which kernels a compiled module would have on a GPU, without a GPU.

Graphs are traced on the CPU's tensors and scheduled for Triton on an H100. No code is generated, and nothing is run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables.builder import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config, ir, scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from clap_ds.planning.cuda_operations import cuda_functions
from clap_ds.planning.tracing import TOWERS, Operation

H100 = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, warp_size=32,
)  # fmt: skip


def is_fusible(operation: Operation) -> bool:
    """Return whether an operation becomes part of Inductor's own kernels if towers are compiled."""
    return operation.part in TOWERS and not operation.flops and operation.name.startswith("aten.")


class _ScheduledError(Exception):
    """Ends the compilation of a graph once it is scheduled."""


def fused_kernels(function: Callable[..., Any], *inputs: Any) -> list[tuple[bool, int]]:
    """Return Inductor's own kernels, forward and backward, of a function or module: whether each is in the backward pass, and
    the bytes that it reads and writes. Products, FFTs, attention and custom operations are not among them.
    """
    found: list[tuple[bool, int]] = []

    def schedule(graph: Any) -> None:
        graph.init_wrapper_code()
        graph._update_scheduler()
        for node in graph.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                found.append((graph.is_backward, node.get_read_write_buffers_sizes()))
        raise _ScheduledError

    def compile_graph(graph: Any, graph_inputs: Any, **options: Any) -> Any:
        try:
            compile_fx.compile_fx_inner(graph, graph_inputs, **options)
        except Exception as error:
            if not isinstance(getattr(error, "inner_exception", error), _ScheduledError):
                raise

        def run(_: Any) -> None:
            raise _ScheduledError

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: Any, graph_inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, graph_inputs, inner_compile=compile_graph)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (GraphLowering, "codegen", schedule),
            (scheduler, "_is_gpu_triton_backend", lambda *_: True),
            (ir, "is_gpu", lambda _: True),
            (DeviceProperties, "create", lambda _: H100),
            (TensorVariable, "method_attr_is_cuda", lambda _, translator: VariableTracker.build(translator, True)),
        ):
            # PyTorch below 2.13 lacks `_is_gpu_triton_backend`, and then a few reductions are counted apart.
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        stack.enter_context(config.patch(cpu_backend="triton", fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False))
        stack.enter_context(cuda_functions())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(suppress(_ScheduledError))
        torch.compile(function, backend=backend)(*inputs)
    return found
