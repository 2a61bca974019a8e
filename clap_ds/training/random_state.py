"""The random number generators of a rank, as plain tensors and numbers that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """State of torch's (CPU, and the GPU's where `device` is one), Python's and NumPy's generators."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put `capture`'s state back. A state captured without a GPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
