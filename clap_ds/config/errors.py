"""What a command says of a mistake that its user can mend: one message, and the exit code 2. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable

USER_ERROR = 2
"""Exit code of a run refused for something its user can mend."""


class UserError(Exception):
    """A mistake to be shown as one message, without a traceback."""


class AgreedError(UserError):
    """One that every rank knows of, so that rank 0 speaks for all."""


def told(action: Callable[[], None]) -> int:
    """Exit code of a command: 0, or 2 with one message for a mistake of its user's or a file that can't be used."""
    try:
        action()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
