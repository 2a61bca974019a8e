"""Run AdamW in DeepSpeed's 16-bit wrapper, on one flat fp32 tensor per group, with torch's fused
kernel or the CPU kernel.

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
NORM_ROW = 4096
"""Elements whose squares are summed in fp32; their sums are added in fp64."""


class FlatAdamW(torch.optim.AdamW, StandInForFusedAdam):
    """Run fused AdamW (arXiv 1711.05101); without DeepSpeed's wrapper (fp32, autocast), torch's.
    With `cpu_kernels`, groups that `cpu_kernels.adamw.supports` use that kernel. The state has the
    same form in all cases."""

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
        by_torch: list[tuple[Tensor, Tensor]] = []
        for group, gradients, (low,) in zip(self.param_groups, grads, output_params, strict=True):
            (master,) = group["params"]
            if self.steps_natively(low):
                self._step_natively(group, gradients, low, float(scale), found_inf)
            else:
                master.grad = gradients[0].float()
                by_torch.append((master, low))
        # torch's fused kernels read these attributes. Masters without a gradient stay.
        is_one = isinstance(scale, float) and scale == 1.0
        self.grad_scale = (
            None if is_one else torch.as_tensor(scale, dtype=torch.float32, device=low.device)
        )
        self.found_inf = found_inf
        super().step()
        self.grad_scale = self.found_inf = None
        for master, low in by_torch:
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
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(master),
                torch.zeros_like(master),
            )
        if found_inf is not None and bool(found_inf):
            return
        state["step"] += 1
        options = {name: group[name] for name in OPTIONS}
        sizes = [each.numel() for each in gradients]
        flats = low, master.detach(), state["exp_avg"], state["exp_avg_sq"]
        lows, *rest = (each.split(sizes) for each in flats)
        adamw_native.native_adamw(
            lows, gradients, *rest, **options, step=int(state["step"]), scale=scale
        )


class FlatStep:
    """Replace the step of DeepSpeed's wrapper around `FlatAdamW` in bf16, without host reads.

    If any gradient isn't finite (on all ranks alike), weights, moments and step counters don't
    change, and `skipped`, scalar bool on the device, is true. DeepSpeed's scheduler continues, so
    that the learning rate depends only on the step number.
    """

    def __init__(self, wrapper: FP16_Optimizer) -> None:
        self._wrapper = wrapper
        device = wrapper.optimizer.param_groups[0]["params"][0].device
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        deepspeed_compat.replace_update(wrapper, self)

    @staticmethod
    def has_place_for(optimizer: Any) -> bool:
        """Return whether this is DeepSpeed's wrapper around `FlatAdamW`, without a loss scale."""
        is_flat = isinstance(optimizer, FP16_Optimizer) and isinstance(
            optimizer.optimizer, FlatAdamW
        )
        return is_flat and not deepspeed_compat.has_loss_scale(optimizer)

    @torch.no_grad()
    def __call__(self) -> bool:
        """Clip and update, and set the wrapper's `_global_grad_norm` to the norm before clipping,
          scalar fp64.
        Return False, like the wrapper without an overflow."""
        wrapper = self._wrapper
        most = self._wrapper.clip_grad
        groups = [*deepspeed_compat.flat_groups(wrapper)]
        gradients = [self._gradients(parameters, flat) for parameters, flat in groups]
        norm = norm_of([*chain(*gradients)], natively=wrapper.optimizer.cpu_kernels)
        deepspeed_compat.set_gradient_norm(wrapper, norm)
        self.skipped = ~norm.isfinite()
        wrapper.optimizer.step(
            grads=gradients,
            output_params=[[flat] for _, flat in groups],
            scale=((norm + 1e-6) / most).clamp(min=1).float() if most > 0 else 1.0,
            found_inf=self.skipped.float(),
        )
        return False

    def _gradients(self, group: Sequence[Tensor], low: Tensor) -> list[Tensor]:
        """Return a group's gradients: one per parameter for the CPU kernel, else one flat tensor,
        to launch few kernels."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in group]
        return (
            gradients
            if self._wrapper.optimizer.steps_natively(low)
            else [_flatten_dense_tensors(gradients)]
        )


def scale_rates(optimizer: Any) -> None:
    """Multiply every group's `lr` by its `lr_scale`, if any, during each step. Between steps `lr`
    is the scheduler's."""
    plain = optimizer.step

    @wraps(plain)
    def step(*args: Any, **kwargs: Any) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1.0)
        plain(*args, **kwargs)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.step = step


def master_weights(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the optimizer's fp32 weights by name, in its order; they may be the model's own."""
    parameters = chain(*deepspeed_compat.parameters_by_group(optimizer))
    masters = chain(*deepspeed_compat.masters_by_group(optimizer))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: master for parameter, master in zip(parameters, masters, strict=True)
    }


def norm_of(tensors: Sequence[Tensor], *, natively: bool = False) -> Tensor:
    """Return the total 2-norm of contiguous tensors, scalar fp64 on their device; `natively`: with
    the CPU kernel if possible. Squares are summed in rows, as a single fp32 sum of 10⁸ would be
    wrong by percents."""
    norms = list[Tensor]()
    if natively and (ready := [each for each in tensors if is_ready(each)]) and not unavailable():
        norms.append(adamw_native.native_norm(ready).view(1))
        tensors = [each for each in tensors if not is_ready(each)]
    for each in tensors:
        whole = each.numel() - each.numel() % NORM_ROW
        for rows in (each.view(-1)[:whole].view(-1, NORM_ROW), each.view(-1)[whole:].view(1, -1)):
            norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)


class WeightAverage:
    """Average the weights exponentially over steps (Polyak and Juditsky 1992). The average starts
    as the current weights; an update keeps the fraction `decay` of it. Frozen weights and buffers
    are the model's own.

    Attributes:
        weights: the average by name, fp32.
    """

    def __init__(self, model: nn.Module, masters: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._masters = [*masters.values()]
        self._models = [model.get_parameter(name) for name in masters]
        self.weights = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step: average = decay · average + (1 - decay) · weights."""
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
        weights = [weight.detach() for weight in self._models]
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, [*self.weights.values()])
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)
