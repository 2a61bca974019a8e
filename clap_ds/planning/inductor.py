"""Ask Inductor's scheduler which kernels a compiled module would have on a GPU, without a GPU.

Graphs are traced on the CPU's tensors and scheduled for Triton on an H100. No code is generated,
and nothing is run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.variables.builder import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch import config as functorch_config
from torch._inductor import config, ir, scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from clap_ds.flop_count.counters import replaced_attributes
from clap_ds.planning.cuda_operations import cuda_functions

H100 = DeviceProperties(
    "cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
)  # fmt: skip


class _ScheduledError(Exception):
    """All graphs are scheduled, and one of them would be run."""


def fused_kernels(function: Callable[..., Any], *inputs: Any) -> list[tuple[bool, int]]:
    """Return Inductor's own kernels, forward and backward, of a function or module.

    Each is a pair: whether it is in the backward pass, and the bytes that it reads and writes.
    Products, FFTs, attention and custom operations are not among them.
    """
    kernels: list[tuple[bool, int]] = []

    def schedule(graph: Any) -> Any:
        """Stand in for `GraphLowering.compile_to_module`, and record the scheduled kernels."""
        graph.init_wrapper_code()
        graph._update_scheduler()
        for node in graph.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                kernels.append((graph.is_backward, node.get_read_write_buffers_sizes()))
        return SimpleNamespace(call=stop)

    def stop(_: Any) -> None:
        raise _ScheduledError

    torch._dynamo.reset()  # it would find graphs that were scheduled before
    with (
        _triton_on_h100(),
        replaced_attributes(GraphLowering, compile_to_module=schedule),
        cuda_functions(),
        warnings.catch_warnings(action="ignore"),
        suppress(_ScheduledError),
    ):
        torch.compile(function)(*inputs)
    return kernels


@contextmanager
def _triton_on_h100() -> Iterator[None]:
    """Make Inductor treat the CPU as an H100, and schedule the backward pass with the forward
    pass."""
    with (
        config.patch(cpu_backend="triton", force_disable_caches=True),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        replaced_attributes(DeviceProperties, create=staticmethod(lambda *_, **__: H100)),
        replaced_attributes(ir, is_gpu=lambda _: True),
        # PyTorch below 2.13 lacks this function, and then a few reductions are counted apart.
        replaced_attributes(scheduler, _is_gpu_triton_backend=lambda *_: True),
        # Model code that asks a tensor, while Dynamo traces it.
        replaced_attributes(TensorVariable, method_attr_is_cuda=_answer_is_cuda),
    ):
        yield


def _answer_is_cuda(_: TensorVariable, translator: Any) -> Any:
    return VariableTracker.build(translator, True)
