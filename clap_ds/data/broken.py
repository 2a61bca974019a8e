"""Describe unusable items and tars."""

from __future__ import annotations

from dataclasses import dataclass


class BrokenItemError(ValueError):
    """Raised for an item that can't be used."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Name an unusable item, or a tar by its path, with the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"
