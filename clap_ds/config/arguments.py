"""Types of command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_number(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """For `type=` of argparse: a whole number of at least `low`, and at most `high` where there is one."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
            expected = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"expected a whole number {expected}, found {text!r}")
        return int(text)

    return parse
