"""Gradient all-reduce that runs under the backward pass, inside the DeepSpeed engine at ZeRO-0.

DeepSpeed reduces after backward, in one go. Torch's own data-parallel reducer does it bucket by bucket as gradients get
ready; `replicate` attaches it to the module DeepSpeed holds, and DeepSpeed's own reduction is switched off.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate

from clap_ds.run_records.timers import standing_still


class GradientSync:
    """Averages gradients over ranks, by DeepSpeed or, `overlapped` with backward, by torch's reducer: every trained parameter
    must then get a gradient in every step."""

    def __init__(self, engine: Any, *, overlapped: bool, bucket_mb: float) -> None:
        self._engine, self._overlapped, self._is_off = engine, overlapped, False
        self._module: Any = engine.module  # an nn.Module that `replicate` gives more methods
        if overlapped:
            replicate(self._module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
            wire = engine.communication_data_type
            dtypes = {parameter.dtype for parameter in self._module.parameters() if parameter.requires_grad}
            # By itself the reducer divides gradients before it adds them, each bucket in its own dtype: the few vectors that
            # stay fp32 travel so. Only in fp16 that loses digits, of small gradients.
            if wire == torch.float16 or wire != min(dtypes, key=lambda dtype: dtype.itemsize):
                self._module.register_comm_hook(wire, average_bucket)
        engine.register_forward_pre_hook(self._settle)  # comes before the module's, where the reducer takes notice

    def _settle(self, module: nn.Module, inputs: Any) -> None:
        """Let the gradients of the pass that begins travel or not: only at the accumulation boundary, if not `off`."""
        if self._overlapped:
            at_boundary = self._engine.is_gradient_accumulation_boundary()
            self._module.set_requires_gradient_sync(at_boundary and not self._is_off)
        # DeepSpeed looks for the boundary itself. On one rank it would copy every gradient to a buffer and back.
        by_deepspeed = not self._overlapped and dist.get_world_size() > 1
        self._engine.enable_backward_allreduce = by_deepspeed and not self._is_off

    def backward(self, loss: Tensor, **options: Any) -> None:
        """DeepSpeed's backward pass. Ranks stand still from when their own gradients are there until it returns: autograd's
        callbacks run in the order in which they were queued, the reducer's own, which waits, after this first one."""
        with ExitStack() as waiting:
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            loss.register_hook(lambda _: queue(lambda: waiting.enter_context(standing_still())))
            self._engine.backward(loss, **options)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Gradients of forward passes in here stay local: to measure what sending costs."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False


def average_bucket(wire_dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: averages a bucket of gradients over ranks as DeepSpeed's `allreduce_bucket` would."""
    gradients = bucket.buffer()

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        mean = future.value()[0].mul_(1 / dist.get_world_size())
        return mean if mean.dtype == gradients.dtype else gradients.copy_(mean)

    return dist.all_reduce(gradients.to(wire_dtype), async_op=True).get_future().then(finish)
