"""A rank's random number generators: training resumes from their state, cached accumulation repeats a forward pass from it."""

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """State of torch's (CPU, and the GPU's where `device` is one), Python's and NumPy's generators, as plain tensors and
    numbers that `torch.load(weights_only=True)` reads."""
    _, keys, *others = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), *others),
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put `random_state` back. One captured without a GPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    keys, *others = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *others))
