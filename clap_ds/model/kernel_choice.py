"""Which kernel computes a part of the model: what modules hold from their construction on, and what a choice made for a device
(`engine`) puts in its place before anything is traced or run. Nothing looks a kernel up in a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Launch(NamedTuple):
    """How a Triton kernel is compiled and launched."""

    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Iterations whose loads are under way at a time."""
    max_registers: int = 0
    """Of a thread; 0: as many as the compiler wants."""

    def __str__(self) -> str:
        return f"{self.num_warps}w{self.num_stages}s" + (f"{self.max_registers}r" if self.max_registers else "")


@dataclass(frozen=True)
class KernelChoice:
    """A kernel by name and, of Triton kernels, how each way is launched; None: as its module finds best untried."""

    name: str
    forward: Launch | None = None
    backward: Launch | None = None

    def __str__(self) -> str:
        launches = [str(launch or "–") for launch in (self.forward, self.backward)]
        return self.name if self.forward is self.backward is None else f"{self.name} {'/'.join(launches)}"
