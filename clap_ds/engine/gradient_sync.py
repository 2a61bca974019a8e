"""All-reduce gradients during the backward pass, inside the DeepSpeed engine at ZeRO-0.

DeepSpeed reduces all gradients after backward. Torch's data-parallel reducer sends each bucket when
its gradients are ready: `replicate` attaches it to DeepSpeed's module, and DeepSpeed's own
reduction is disabled.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate

from clap_ds.engine import deepspeed_compat
from clap_ds.engine.loss import PeerWait


class GradientSync:
    """Averaging of gradients over ranks by DeepSpeed or, `overlapped` with backward, by torch's
    reducer. The latter requires that every trained parameter gets a gradient in every step."""

    def __init__(
        self, engine: Any, *, overlapped: bool, bucket_mb: float, peer_wait: PeerWait
    ) -> None:
        """Attach to DeepSpeed's engine.

        Args:
            bucket_mb: size of the reducer's buckets in MiB.
        """
        self._engine = engine
        self._is_off = False
        self._peer_wait = peer_wait
        # `replicate` adds methods to the module.
        self._module: Any = engine.module
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        narrowest = min((p.dtype for p in trained), key=lambda dtype: dtype.itemsize)
        # The reducer sends each gradient in its own dtype, so DeepSpeed averages those of a run
        # with another `communication_data_type`.
        self._overlapped = overlapped and engine.communication_data_type == narrowest
        if self._overlapped:
            replicate(self._module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        # The engine's hook runs before the module's, which the reducer uses.
        engine.register_forward_pre_hook(self._enable_allreduce)

    def _enable_allreduce(self, module: nn.Module, inputs: Any) -> None:
        """Enable the all-reduce of the coming pass only at the accumulation boundary, and not in
        `off`."""
        if self._overlapped:
            at_boundary = self._engine.is_gradient_accumulation_boundary()
            self._module.set_requires_gradient_sync(at_boundary and not self._is_off)
        # DeepSpeed checks the boundary itself. On one rank it would copy every gradient to a buffer
        # and back.
        by_deepspeed = not self._overlapped and dist.get_world_size() > 1
        deepspeed_compat.enable_allreduce(self._engine, by_deepspeed and not self._is_off)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run DeepSpeed's backward pass, and record the time from this rank's last gradient to its
        return as a wait for other ranks."""
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        with ExitStack() as wait:

            def start_wait() -> None:
                wait.enter_context(self._peer_wait())

            # Autograd runs callbacks in the order of queueing: this one first, then the reducer's,
            # which waits.
            loss.register_hook(lambda _: queue(start_wait))
            self._engine.backward(loss, **options)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep the gradients of the body's forward passes local, to measure the cost of sending."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False
