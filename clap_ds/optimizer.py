"""AdamW for DeepSpeed's 16-bit wrapper: torch's fused kernel over one flat fp32 tensor a group.

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

    The wrapper must be told `legacy_fusion`: it then hands over gradients as they were computed, one flat tensor a group.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, fused=True, **options)

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
        masters = [group["params"][0] for group in self.param_groups]
        for master, (gradient,) in zip(masters, grads, strict=True):
            master.grad = gradient.float()
            if scale != 1.0:
                master.grad /= scale
        super().step()
        for master, (low,) in zip(masters, output_params, strict=True):
            low.copy_(master)
            master.grad = None
