"""Gradient all-reduce that runs under the backward pass, inside the DeepSpeed engine at ZeRO-0.

DeepSpeed reduces after backward, in one go. Torch's own data-parallel reducer does it bucket by bucket as gradients get
ready, in the order they really do; it is attached to the module DeepSpeed holds (`replicate` keeps parameter names, which
DistributedDataParallel would change) and DeepSpeed's own reduction is switched off. Only what the reducer leaves open is
written here: the data type on the wire and the averaging as DeepSpeed's configuration says, synchronisation at the
accumulation boundary alone, and parameters that get no gradient, found in a first step that DeepSpeed reduces itself. Whether
gradients travel is settled here alone, before each forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate

from clap_ds.ranks.agreement import gather


class GradientSync:
    """Averages gradients over ranks, by DeepSpeed or overlapped with backward.

    Args:
        engine: DeepSpeed's engine, ZeRO-0.
        overlapped: let torch's reducer do it, from the second step on.
        bucket_mb: bytes a bucket of gradients holds at most, in MB.
    """

    def __init__(self, engine: Any, *, overlapped: bool, bucket_mb: float) -> None:
        self._engine = engine
        self._module: Any = engine.module  # an nn.Module that `replicate` gives more methods
        self._bucket_mb = bucket_mb
        self._attached = self._is_off = False
        self._recorder = _UsedParameters(self._module) if overlapped else None
        engine.register_forward_pre_hook(self._settle)  # comes before the module's, where the reducer takes notice

    def _settle(self, module: nn.Module, inputs: Any) -> None:
        """Let the gradients of the pass that begins travel or not: only at the accumulation boundary, if not `off`."""
        if self._attached:
            at_boundary = self._engine.is_gradient_accumulation_boundary()
            self._module.set_requires_gradient_sync(at_boundary and not self._is_off)
        # DeepSpeed looks for the boundary itself. On one rank it would copy every gradient to a buffer and back.
        by_deepspeed = not self._attached and dist.get_world_size() > 1
        self._engine.enable_backward_allreduce = by_deepspeed and not self._is_off

    def after_step(self) -> None:
        """Call after every optimiser step: the first one decides how the reducer is attached."""
        if self._recorder is not None:
            self._attach(find_unused=self._recorder.any_unused())
            self._recorder = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Gradients of forward passes in here stay local, whatever calls them: to measure what sending costs. Weights
        drift apart if a step is taken on them."""
        self._is_off, before = True, self._is_off
        try:
            yield
        finally:
            self._is_off = before

    def _attach(self, *, find_unused: bool) -> None:
        replicate(
            self._module,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused,
        )
        self._module.register_comm_hook(Averaging.of(self._engine), reduce_bucket)
        self._attached = True


class _UsedParameters:
    """Notes which parameters get a gradient until asked."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._used: set[int] = set()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in self._parameters]

    def _note(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def any_unused(self) -> bool:
        """Whether on any rank some parameter got none. A collective; stops noting."""
        for hook in self._hooks:
            hook.remove()
        return any(gather(any(id(parameter) not in self._used for parameter in self._parameters)))


@dataclass(frozen=True)
class Averaging:
    """What DeepSpeed's configuration says of a reduction: type on the wire, factors before and after the sum over ranks."""

    wire_dtype: torch.dtype
    before: float
    after: float

    @classmethod
    def of(cls, engine: Any) -> "Averaging":
        """Of `communication_data_type`, `prescale_gradients`, `gradient_predivide_factor` and `gradient_allreduce_op`."""
        before, after = 1.0, 1.0
        if engine.gradient_average:
            predivide, world_size = engine.gradient_predivide_factor(), dist.get_world_size()
            before, after = (
                (1 / predivide, predivide / world_size) if engine.postscale_gradients() else (1 / world_size, 1.0)
            )
        return cls(engine.communication_data_type, before, after)


def reduce_bucket(averaging: Averaging, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: sums a bucket of gradients over ranks as DeepSpeed's `allreduce_bucket` would."""
    gradients = bucket.buffer()
    wire = gradients.to(averaging.wire_dtype)
    if averaging.before != 1:
        wire.mul_(averaging.before)

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        reduced = future.value()[0]
        if averaging.after != 1:
            reduced.mul_(averaging.after)
        return reduced if reduced.dtype == gradients.dtype else gradients.copy_(reduced)

    return dist.all_reduce(wire, async_op=True).get_future().then(finish)
