"""Run AdamW in DeepSpeed's 16-bit wrapper, on one flat fp32 tensor per group, with torch's fused
kernel or the CPU kernel; average its weights.

DeepSpeed's wrapper keeps groups flat only for its own FusedAdam, which requires a CUDA toolkit.
`FlatAdamW` replaces it. The wrapper's step reads every group's norm on the host. In bf16, whose
loss scale is always 1, `FlatStep` computes it on the device. In fp16 the next loss scale depends on
the overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from clap_ds.cpu_kernels import adamw as adamw_native
from clap_ds.cpu_kernels.jit_build import is_ready, unavailable
from clap_ds.engine import deepspeed_compat
from clap_ds.engine.deepspeed_compat import FP16_Optimizer, StandInForFusedAdam

OPTIONS = frozenset({"lr", "betas", "eps", "weight_decay"})
"""Fields of `optimizer.params` that `FlatAdamW` supports."""
# Elements whose squares are summed in fp32; their sums are added in fp64.
NORM_ROW = 4096
# In the divisor of clipped gradients, as in DeepSpeed.
CLIP_EPSILON = 1e-6


class FlatAdamW(torch.optim.AdamW, StandInForFusedAdam):
    """Fused AdamW (arXiv 1711.05101); without DeepSpeed's wrapper (fp32, autocast), torch's. With
    `cpu_kernels`, groups of bf16 weights on a CPU use that kernel. The state has the same form in
    all cases."""

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
        """Update the weights; `closure` and `grad_norms` are unused.

        Args:
            grads: each group's flat gradient in one tensor or, for the CPU kernel, several; None:
                the parameters' own.
            output_params: each group's flat tensor in the model's dtype, which receives the new
                weights.
            scale: divisor of `grads`; if a tensor, scalar fp32 on their device.
            found_inf: scalar fp32 on the device of `grads`; 1 leaves weights, moments and step
                counters unchanged.
        """
        if grads is None or output_params is None:
            super().step()
            return
        # Groups that torch's kernel steps are stepped together at the end.
        stepped_by_torch: list[tuple[Tensor, Tensor]] = []
        for group, gradients, (low,) in zip(self.param_groups, grads, output_params, strict=True):
            (master,) = group["params"]
            if self.steps_natively(low):
                self._step_natively(group, gradients, low, float(scale), found_inf)
            else:
                master.grad = gradients[0].float()
                stepped_by_torch.append((master, low))
        # torch's fused kernels read these attributes. Masters without a gradient stay.
        self.grad_scale = None
        if isinstance(scale, Tensor) or scale != 1.0:
            self.grad_scale = torch.as_tensor(scale, dtype=torch.float32, device=low.device)
        self.found_inf = found_inf
        super().step()
        self.grad_scale = None
        self.found_inf = None
        for master, low in stepped_by_torch:
            low.copy_(master)
            master.grad = None

    def steps_natively(self, low: Tensor) -> bool:
        """Return whether the CPU kernel supports a group with this tensor in the model's dtype."""
        return self.cpu_kernels and is_ready(low) and not unavailable()

    def _step_natively(
        self,
        group: dict[str, Any],
        gradients: list[Tensor],
        low: Tensor,
        scale: float,
        found_inf: Tensor | None,
    ) -> None:
        (master,) = group["params"]
        state = self.state[master]
        if not state:
            # The names and dtypes of torch's AdamW.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        # On a CPU, reading it waits for nothing.
        if found_inf is not None and bool(found_inf):
            return
        state["step"] += 1
        # The kernel updates a slice of each flat tensor per gradient.
        sizes = [gradient.numel() for gradient in gradients]
        adamw_native.native_adamw(
            low.split(sizes),
            gradients,
            master.detach().split(sizes),
            state["exp_avg"].split(sizes),
            state["exp_avg_sq"].split(sizes),
            **{name: group[name] for name in OPTIONS},
            step=int(state["step"]),
            scale=scale,
        )


class FlatStep:
    """Replacement for the step of DeepSpeed's wrapper around `FlatAdamW` in bf16, without host
    reads.

    If any gradient isn't finite (on all ranks alike), weights, moments and step counters don't
    change, and `skipped`, scalar bool on the device, is true. DeepSpeed's scheduler continues, so
    that the learning rate depends only on the step number.
    """

    def __init__(self, wrapper: FP16_Optimizer, max_norm: float) -> None:
        """Replace the wrapper's step by one that clips gradients to `max_norm`; 0 doesn't clip."""
        self._wrapper = wrapper
        self._optimizer: FlatAdamW = deepspeed_compat.inner_optimizer(wrapper)
        self._max_norm = max_norm
        device = self._optimizer.param_groups[0]["params"][0].device
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        deepspeed_compat.replace_update(wrapper, self)

    @staticmethod
    def is_applicable(optimizer: Any) -> bool:
        """Return whether this is DeepSpeed's wrapper around `FlatAdamW`, without a loss scale."""
        return (
            isinstance(optimizer, FP16_Optimizer)
            and isinstance(deepspeed_compat.inner_optimizer(optimizer), FlatAdamW)
            and not deepspeed_compat.has_loss_scale(optimizer)
        )

    @torch.no_grad()
    def __call__(self) -> bool:
        """Clip and update, and set the wrapper's gradient norm to the one before clipping, scalar
        fp64. Return False, like the wrapper without an overflow."""
        groups = [*deepspeed_compat.flat_groups(self._wrapper)]
        gradients = [self._gradients(parameters, low) for parameters, low in groups]
        norm = norm_of([*chain(*gradients)], natively=self._optimizer.cpu_kernels)
        deepspeed_compat.set_gradient_norm(self._wrapper, norm)
        # Ranks have the same gradients after the all-reduce, so all decide alike.
        self.skipped = ~norm.isfinite()
        # Clipped gradient: g / max(1, (‖g‖ + ε) / max_norm)
        divisor: float | Tensor = 1.0
        if self._max_norm > 0:
            divisor = ((norm + CLIP_EPSILON) / self._max_norm).clamp(min=1).float()
        self._optimizer.step(
            grads=gradients,
            output_params=[[low] for _, low in groups],
            scale=divisor,
            found_inf=self.skipped.float(),
        )
        return False

    def _gradients(self, parameters: Sequence[Tensor], low: Tensor) -> list[Tensor]:
        """Return a group's gradients: one per parameter for the CPU kernel, else one flat tensor,
        to launch few kernels."""
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in parameters
        ]
        if self._optimizer.steps_natively(low):
            return gradients
        return [_flatten_dense_tensors(gradients)]


def scale_rates(optimizer: Any) -> None:
    """Multiply every group's `lr` by its `lr_scale`, if any, during each step. Between steps `lr`
    is the scheduler's."""
    unscaled_step = optimizer.step

    @wraps(unscaled_step)
    def step(*args: Any, **kwargs: Any) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1.0)
        unscaled_step(*args, **kwargs)
        # Dividing by `lr_scale` would round.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.step = step


def master_weights(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the optimizer's fp32 weights by name, in its order; they may be the model's own."""
    # Both are in the optimizer's order.
    parameters = chain(*deepspeed_compat.parameters_by_group(optimizer))
    masters = chain(*deepspeed_compat.masters_by_group(optimizer))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: master for parameter, master in zip(parameters, masters, strict=True)
    }


def norm_of(tensors: Sequence[Tensor], *, natively: bool) -> Tensor:
    """Return the total 2-norm of contiguous tensors, scalar fp64 on their device.

    Args:
        natively: use the CPU kernel if possible.
    """
    norms = list[Tensor]()
    if natively and not unavailable():
        native_tensors = [tensor for tensor in tensors if is_ready(tensor)]
        tensors = [tensor for tensor in tensors if not is_ready(tensor)]
        if native_tensors:
            norms.append(adamw_native.native_norm(native_tensors).view(1))
    for tensor in tensors:
        # Squares are summed in rows: a single fp32 sum of 10⁸ would be wrong by percents.
        remainder = tensor.numel() % NORM_ROW
        # Full rows, and a last one with what remains.
        flat = tensor.view(-1)
        rows = flat[: tensor.numel() - remainder].view(-1, NORM_ROW)
        last_row = flat[tensor.numel() - remainder :].view(1, -1)
        norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))
        norms.append(torch.linalg.vector_norm(last_row, dim=1, dtype=torch.float32))
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)


class ModelEma:
    """Exponential moving average of the weights over steps (Polyak and Juditsky 1992). It starts
    as the current weights. Frozen weights and buffers are the model's own.

    Attributes:
        weights: the average by name, fp32.
    """

    def __init__(self, model: nn.Module, masters: Mapping[str, Tensor], decay: float) -> None:
        """Average the `masters`; an update keeps the fraction `decay` of the average."""
        self._decay = decay
        self._masters = [*masters.values()]
        self._parameters = [model.get_parameter(name) for name in masters]
        self.weights = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step: average = decay · average + (1 - decay) · weights."""
        # lerp(a, w, t) = a + t · (w - a), for all tensors in few kernels.
        torch._foreach_lerp_([*self.weights.values()], self._masters, 1 - self._decay)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Set the average to these weights by name; missing ones stay."""
        for name, average in self.weights.items():
            average.copy_(weights.get(name, average))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the average, in their dtypes, and restore them exactly
        afterwards."""
        # Without DeepSpeed's 16-bit wrapper these are the optimizer's own weights.
        weights = [parameter.detach() for parameter in self._parameters]
        copies = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, [*self.weights.values()])
        try:
            yield
        finally:
            torch._foreach_copy_(weights, copies)
