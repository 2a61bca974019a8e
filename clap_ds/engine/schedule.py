"""A schedule of the learning rate that neither DeepSpeed nor torch has."""

import math
from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class WarmupStableDecayLR(LambdaLR):
    """Warm up over `warmup_num_steps`, hold the rate, and lower it over the last `decay_num_steps`
    of `total_num_steps` to the share `min_ratio`, linearly or by the power `decay_power` (WSD,
    arXiv 2404.06395; open_clip's `const-cooldown`). With `cosine`, and a decay of all steps after
    the warm-up, it is open_clip's `cosine`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        decay_num_steps: int,
        warmup_num_steps: int = 0,
        min_ratio: float = 0.0,
        decay_power: float = 1.0,
        cosine: bool = False,
    ) -> None:
        if warmup_num_steps + decay_num_steps > total_num_steps or min_ratio > 1:
            expected = "expected warmup_num_steps + decay_num_steps of at most total_num_steps, and min_ratio of at most 1"
            raise ValueError(f"scheduler.params: {expected}")

        def ratio(step: int) -> float:
            left = min(1.0, max(0, total_num_steps - step) / decay_num_steps)
            if cosine:
                left = (1 - math.cos(math.pi * left)) / 2
            decayed = min_ratio + (1 - min_ratio) * left**decay_power
            return min(decayed, (step + 1) / warmup_num_steps) if warmup_num_steps else decayed

        super().__init__(optimizer, ratio)
