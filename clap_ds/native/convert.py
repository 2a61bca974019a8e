"""The door to this project's CPU kernels: `convert` has a model use them, which itself knows nothing of them.

AdamW's kernel, which isn't a module's, is in `clap_ds.native.adamw`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

from clap_ds.native.library import unavailable
from clap_ds.native.modules import NATIVE


def report(setting: Literal["auto", "off"]) -> str:
    """`native` where bf16 models on this CPU run by these kernels, by this `clap.cpu_kernels`; else `torch` and why."""
    reason = 'clap.cpu_kernels is "off"' if setting == "off" else unavailable()
    return f"torch: {reason}" if reason else "native"


def convert(model: nn.Module) -> None:
    """Have a model run by CPU kernels, in place: modules for which there are kernels become subclasses of what they were, with
    the same parameters, names and hooks. Nothing changes where kernels can't run."""
    if unavailable():
        return
    native_by_plain = {native.__bases__[-1]: native for native in NATIVE}
    for module in model.modules():
        native = native_by_plain.get(type(module))
        if native is not None and native.fits(module):
            module.__class__ = native


@contextmanager
def reverted(model: nn.Module) -> Iterator[None]:
    """Has a converted model, or part of one, run by torch's operations for the time: those that FLOP counters know."""
    converted = [(module, type(module)) for module in model.modules() if isinstance(module, NATIVE)]
    for module, native in converted:
        module.__class__ = native.__bases__[-1]
    try:
        yield
    finally:
        for module, native in converted:
            module.__class__ = native
