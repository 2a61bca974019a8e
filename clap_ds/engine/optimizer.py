"""AdamW for DeepSpeed's 16-bit wrapper, over one flat fp32 tensor a group: torch's fused kernel, or on CPUs this project's.

DeepSpeed's wrapper keeps groups flat only for its own FusedAdam, which needs a CUDA toolkit on every machine: `FlatAdamW` takes
its place. The wrapper's own step reads every group's norm on the host. In bf16, whose loss scale is always 1, `FlatStep` does
the same on the device; in fp16 the next loss scale hangs on the overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from clap_ds.cpu_kernels import adamw as adamw_native
from clap_ds.cpu_kernels.jit_build import is_ready, unavailable

OPTIONS = frozenset({"lr", "betas", "eps", "weight_decay"})
"""Of `optimizer.params`, what `FlatAdamW` takes."""
REQUIRED = {"adam_w_mode": True, "fused": True, "torch_adam": False}
"""What else `optimizer.params` may hold for it to stand in for what DeepSpeed would make of them: just these values."""
NORM_ROW = 4096
"""Numbers whose squares are added up in fp32, before fp64 takes over."""


class _InPlaceOfFusedAdam(FusedAdam):
    """Has DeepSpeed take a subclass for its FusedAdam, and keeps that from being compiled."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)

    zero_grad = torch.optim.Optimizer.zero_grad


class FlatAdamW(torch.optim.AdamW, _InPlaceOfFusedAdam):
    """AdamW (arXiv 1711.05101), fused. Without DeepSpeed's wrapper (fp32, autocast) it is torch's. With `cpu_kernels`, groups
    that `cpu_kernels.adamw.supports` are stepped by its kernel. The state is of the same form either way."""

    def __init__(self, params: Iterable[Any], *, cpu_kernels: bool = True, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self.cpu_kernels = cpu_kernels

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: list[list[Tensor]] | None = None,
        output_params: list[list[Tensor]] | None = None,
        scale: float | Tensor = 1.0,
        grad_norms: Any = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update; `closure` and `grad_norms` are for the interface.

        Args:
            grads: of each group's master, flat, in one tensor or several; None to take them from the parameters themselves.
            output_params: of each group, a flat tensor of the model's dtype that gets the new weights.
            scale: what `grads` are to be divided by; a tensor is scalar fp32 on their device.
            found_inf: scalar fp32 on the device of `grads`; 1 leaves weights, moments and step counters as they are.
        """
        if grads is None or output_params is None:
            super().step()
            return
        by_torch: list[tuple[Tensor, Tensor]] = []
        for group, gradients, (low,) in zip(self.param_groups, grads, output_params, strict=True):
            (master,) = group["params"]
            if self.steps_natively(gradients, low, master):
                self._step_natively(group, gradients, low, float(scale), found_inf)
                continue
            flat = gradients[0] if len(gradients) == 1 else torch.cat([each.view(-1) for each in gradients])
            master.grad = flat.float()
            by_torch.append((master, low))
        if by_torch:
            # These attributes are where torch's fused kernels look for both. Masters without a gradient stay.
            is_one = not isinstance(scale, Tensor) and scale == 1.0
            self.grad_scale = None if is_one else torch.as_tensor(scale, dtype=torch.float32, device=low.device)
            self.found_inf = found_inf
            super().step()
            self.grad_scale = self.found_inf = None
        for master, low in by_torch:
            low.copy_(master)
            master.grad = None

    def steps_natively(self, gradients: Sequence[Tensor], low: Tensor, master: Tensor) -> bool:
        """Whether the CPU kernel steps a group of these."""
        return self.cpu_kernels and adamw_native.supports(low, low, master) and is_ready(*gradients)

    def _step_natively(
        self, group: dict[str, Any], gradients: list[Tensor], low: Tensor, scale: float, found_inf: Tensor | None
    ) -> None:
        (master,) = group["params"]
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        if found_inf is not None and bool(found_inf):
            return
        state["step"] += 1
        options = {name: group[name] for name in OPTIONS}
        sizes = [each.numel() for each in gradients]
        masters, *moments = (each.split(sizes) for each in (master.detach(), state["exp_avg"], state["exp_avg_sq"]))
        tensors = low.split(sizes), gradients, masters, *moments
        adamw_native.native_adamw(*tensors, **options, step=int(state["step"]), scale=scale)


class FlatStep:
    """The step of DeepSpeed's wrapper over `FlatAdamW` in bf16, in place of the wrapper's own, with no host reads.

    Where any gradient isn't finite, and so on all ranks, weights, moments and step counters stay as they are: `skipped`, scalar
    bool on the device. DeepSpeed isn't told: its scheduler goes on, so that a step's learning rate is that of its number.
    """

    def __init__(self, wrapper: FP16_Optimizer) -> None:
        self._wrapper = wrapper
        self.skipped = torch.zeros((), dtype=torch.bool, device=wrapper.fp32_groups_flat[0].device)
        self._flats = wrapper.fp16_groups_flat, wrapper.fp32_groups_flat
        wrapper.step_fused_adam = self

    @staticmethod
    def has_place_for(optimizer: Any) -> bool:
        """Whether DeepSpeed steps this one through its wrapper over `FlatAdamW`, without a loss scale."""
        is_flat = isinstance(optimizer, FP16_Optimizer) and isinstance(optimizer.optimizer, FlatAdamW)
        return is_flat and not optimizer.loss_scale_config.use_grad_scaling

    @torch.no_grad()
    def __call__(self) -> bool:
        """Clip and update; the wrapper's `_global_grad_norm` is then the norm before clipping, scalar fp64. Returns False,
        as the wrapper does where nothing overflowed."""
        wrapper = self._wrapper
        gradients = [self._gradients(*group) for group in zip(wrapper.fp16_groups, *self._flats, strict=True)]
        norm = wrapper._global_grad_norm = norm_of(
            [each for group in gradients for each in group], natively=wrapper.optimizer.cpu_kernels
        )
        self.skipped = ~norm.isfinite()
        most = wrapper.clip_grad
        wrapper.optimizer.step(
            grads=gradients,
            output_params=[[low] for low in wrapper.fp16_groups_flat],
            scale=((norm + 1e-6) / most).clamp(min=1).float() if most > 0 else 1.0,
            found_inf=self.skipped.float(),
        )
        return False

    def _gradients(self, group: Sequence[Tensor], low: Tensor, master: Tensor) -> list[Tensor]:
        """Of a group's parameters: each its own where the CPU kernel takes them, else flat, for few kernels."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in group]
        natively = self._wrapper.optimizer.steps_natively(gradients, low, master)
        return gradients if natively else [_flatten_dense_tensors(gradients)]


def scale_rates(optimizer: Any) -> None:
    """Have each step take every group's `lr` times its `lr_scale`, if any. Between steps `lr` is the scheduler's."""
    if not any("lr_scale" in group for group in optimizer.param_groups):
        return
    plain = optimizer.step

    @wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * group.get("lr_scale", 1.0)
        result = plain(*args, **kwargs)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return result

    optimizer.step = step


def master_tensors(optimizer: Any) -> list[Tensor]:
    """The weights in fp32, as DeepSpeed's optimiser holds them: flat by group, or one by one, perhaps the model's own."""
    if hasattr(optimizer, "fp32_groups_flat"):
        return list(optimizer.fp32_groups_flat)
    return list(chain(*getattr(optimizer, "fp32_groups", _model_groups(optimizer))))


def by_parameter(optimizer: Any, masters: Iterable[Tensor]) -> dict[int, Tensor]:
    """Parts of tensors that are laid out as `master_tensors`, by the id of the model's parameter."""
    groups = _model_groups(optimizer)
    if hasattr(optimizer, "fp32_groups_flat"):
        masters = chain(*map(_unflatten_dense_tensors, masters, groups))
    return {id(parameter): fp32 for parameter, fp32 in zip(chain(*groups), masters, strict=True)}


def _model_groups(optimizer: Any) -> list[list[Tensor]]:
    return getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]


def norm_of(tensors: Sequence[Tensor], *, natively: bool = False) -> Tensor:
    """2-norm of contiguous tensors taken together, scalar fp64 on their device; `natively`, by the CPU kernel where that can
    be. By rows: one fp32 sum of 10⁸ squares would lose percents."""
    taken = [each for each in tensors if natively and is_ready(each) and not unavailable()]
    norms = [adamw_native.native_norm(taken).view(1)] if taken else []
    for each in tensors:
        if not (taken and is_ready(each)):
            whole = each.numel() - each.numel() % NORM_ROW
            for rows in (each.view(-1)[:whole].view(-1, NORM_ROW), each.view(-1)[whole:].view(1, -1)):
                norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
