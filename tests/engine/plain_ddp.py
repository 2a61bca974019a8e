"""The engine's reference: torch's DistributedDataParallel and AdamW, in bf16 with explicit fp32
master weights."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from clap_ds.config.schema import TrainSettings
from clap_ds.data.batch import Batch
from clap_ds.engine.factory import parameter_groups
from clap_ds.engine.loss import SoftmaxLoss
from clap_ds.model.clap import ClapModel


class PlainDDP:
    """A model trained on its device, with `precision` fp32, bf16 or autocast, and AdamW's `options`.
    Gradients are clipped to norm `clip` unless it is 0.

    Attributes:
        masters: fp32 weights by name; in bf16 the model has them rounded.
        norm: norm of the last step's gradients before clipping.
    """

    def __init__(
        self,
        model: ClapModel,
        accumulation: int,
        precision: str,
        options: dict[str, Any],
        clip: float = 0.0,
    ) -> None:
        self.precision = precision
        self.accumulation = accumulation
        self.clip = clip
        self.model = model
        if precision == "bf16":
            # DeepSpeed also copies master weights from cast parameters.
            self.model.to(torch.bfloat16)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.masters: dict[str, Tensor] = {}
        groups = []
        for group in parameter_groups(self.model, TrainSettings()):
            masters = {names[id(p)]: p.detach().float().clone() for p in group["params"]}
            self.masters |= masters
            groups.append({**group, "params": [*masters.values()]})
        self.optimizer = torch.optim.AdamW(groups, **options)
        self.ddp = DistributedDataParallel(self.model)
        self.loss = SoftmaxLoss(torch.float32 if precision == "fp32" else torch.bfloat16)

    def step(self, batches: Iterator[Batch]) -> float:
        """Take one optimizer step and return the mean loss of its micro-batches."""
        device_type = self.model.logit_scale.device.type
        total = 0.0
        for micro_step in range(self.accumulation):
            batch = next(batches)
            self.ddp.require_backward_grad_sync = micro_step == self.accumulation - 1
            with torch.autocast(device_type, torch.bfloat16, enabled=self.precision == "autocast"):
                features = self.ddp(*batch.tensors())
            loss = self.loss(*features)
            (loss / self.accumulation).backward()
            total += float(loss.detach()) / self.accumulation
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.masters[name].grad = parameter.grad.float()
            parameter.grad = None
        max_norm = self.clip or torch.inf
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.masters.values(), max_norm))
        assert self.norm > 2 * self.clip
        self.optimizer.step()
        self.take(self.masters)
        return total

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Continue from these fp32 weights."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.masters[name].copy_(weights[name]))
