"""What in shards can't be used, and why."""

from __future__ import annotations

from dataclasses import dataclass


class BrokenItemError(ValueError):
    """An item that can't be used."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something in the shards that can't be used: an item or, by its path, a tar."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"
