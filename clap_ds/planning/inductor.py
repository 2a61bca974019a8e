"""Ask Inductor's scheduler which kernels a compiled module would have on a GPU, without a GPU.

Graphs are traced on the CPU's tensors and scheduled for Triton on an H100. No code is generated,
and nothing is run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables.builder import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch import config as functorch_config
from torch._inductor import config, ir, scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from clap_ds.planning.cuda_operations import cuda_functions

H100 = DeviceProperties(
    "cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
)  # fmt: skip


class _ScheduledError(Exception):
    """Is raised instead of running a graph."""


def fused_kernels(function: Callable[..., Any], *inputs: Any) -> list[tuple[bool, int]]:
    """Return Inductor's own kernels, forward and backward, of a function or module: whether each is
    in the backward pass, and the bytes that it reads and writes. Products, FFTs, attention and
    custom operations are not among them."""
    found: list[tuple[bool, int]] = []

    def schedule(graph: Any) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        for node in graph.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                found.append((graph.is_backward, node.get_read_write_buffers_sizes()))
        return SimpleNamespace(call=stop)

    def stop(_: Any) -> None:
        raise _ScheduledError

    torch._dynamo.reset()  # it would find graphs that were scheduled before
    with (
        mock.patch.object(GraphLowering, "compile_to_module", schedule),
        # PyTorch below 2.13 lacks this function, and then a few reductions are counted apart.
        mock.patch.multiple(scheduler, _is_gpu_triton_backend=lambda *_: True, create=True),
        mock.patch.multiple(ir, is_gpu=lambda _: True),
        mock.patch.object(DeviceProperties, "create", return_value=H100),
        mock.patch.object(
            TensorVariable, "method_attr_is_cuda", lambda _, each: VariableTracker.build(each, True)
        ),
        config.patch(cpu_backend="triton", force_disable_caches=True),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        cuda_functions(),
        warnings.catch_warnings(action="ignore"),
        suppress(_ScheduledError),
    ):
        torch.compile(function)(*inputs)
    return found
