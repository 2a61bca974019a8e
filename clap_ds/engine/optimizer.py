"""AdamW for DeepSpeed's 16-bit wrapper, over one flat fp32 tensor a group: torch's fused kernel, or on CPUs this project's.

Left to itself, DeepSpeed's wrapper walks torch's AdamW parameter by parameter, with two passes and a host synchronisation
each for their norms. It keeps groups flat only for its own FusedAdam, which it compiles at first use: a minute, and a CUDA
toolkit on every machine. `FlatAdamW` is torch's AdamW in FusedAdam's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from torch import Tensor

from clap_ds.native import adamw as adamw_native

OPTIONS = frozenset({"lr", "betas", "eps", "weight_decay"})
"""Of `optimizer.params`, what `FlatAdamW` takes."""
REQUIRED = {"adam_w_mode": True, "fused": True, "torch_adam": False}
"""What else `optimizer.params` may hold for it to stand in for what DeepSpeed would make of them: just these values."""


class _InPlaceOfFusedAdam(FusedAdam):
    """Has DeepSpeed take a subclass for its FusedAdam, and keeps that from being compiled."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)

    zero_grad = torch.optim.Optimizer.zero_grad


class FlatAdamW(torch.optim.AdamW, _InPlaceOfFusedAdam):
    """AdamW (arXiv 1711.05101), fused. Without DeepSpeed's wrapper (fp32, autocast) it is torch's.

    The wrapper needs `legacy_fusion`, with which it hands over gradients as they were computed, one flat tensor a group.
    With `cpu_kernels`, groups that `native.adamw.supports` are stepped by its kernel. The state is of the same form either way.
    """

    def __init__(self, params: Iterable[Any], *, cpu_kernels: bool = True, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self._cpu_kernels = cpu_kernels

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: list[list[Tensor]] | None = None,
        output_params: list[list[Tensor]] | None = None,
        scale: float | Tensor = 1.0,
        grad_norms: Any = None,
    ) -> None:
        """One update.

        Args:
            closure: for the interface; must be None.
            grads: of each group's master, flat, in any floating dtype; None to take them from the parameters themselves.
            output_params: of each group, a flat tensor of the model's dtype that gets the new weights.
            scale: what `grads` are to be divided by, for loss scaling and clipping.
            grad_norms: for the interface; `scale` has it in.
        """
        assert closure is None
        if grads is None or output_params is None:
            super().step()
            return
        by_torch: list[tuple[Tensor, Tensor]] = []
        for group, (gradient,), (low,) in zip(self.param_groups, grads, output_params, strict=True):
            (master,) = group["params"]
            plain = self._cpu_kernels and not (group["amsgrad"] or group["maximize"])
            if plain and adamw_native.supports(low, gradient, master):
                self._step_natively(group, gradient, low, float(scale))
                continue
            master.grad = gradient.float()
            if scale != 1.0:
                master.grad /= scale
            by_torch.append((master, low))
        if by_torch:
            super().step()
        for master, low in by_torch:
            low.copy_(master)
            master.grad = None

    def _step_natively(self, group: dict[str, Any], gradient: Tensor, low: Tensor, scale: float) -> None:
        (master,) = group["params"]
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        state["step"] += 1
        options = {name: group[name] for name in OPTIONS}
        adamw_native.native_adamw(
            *([low], [gradient], [master], [state["exp_avg"]], [state["exp_avg_sq"]]),
            **options,
            step=int(state["step"]),
            scale=scale,
        )
