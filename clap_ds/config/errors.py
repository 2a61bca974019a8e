"""User errors: one message and exit code 2. Standard library only."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Collection
from typing import NoReturn

USER_ERROR = 2
"""Exit code of a run rejected for a user error."""
INTERRUPTED = 130


class UserError(Exception):
    """An error to print as one message, without a traceback."""


class CollectiveUserError(UserError):
    """A UserError raised on every rank, so that only rank 0 prints it."""


Mistakes = tuple[type[Exception], ...]
MISTAKES: Mistakes = (UserError, ValueError, OSError)


def exit_code_of(action: Callable[[], object], mistakes: Mistakes = MISTAKES) -> int:
    """Run a command and return its exit code: its own or 0, 2 with a message (further lines indented) for `mistakes`, or 130
    after Ctrl-C."""
    try:
        code = action()
    except KeyboardInterrupt as stop:
        print("; ".join(["error: interrupted", *stop.args]), file=sys.stderr)
        return INTERRUPTED
    except mistakes as error:
        further = "\n" + " " * len("error: ")
        print("error: " + re.sub(r"\n(?=.)", further, printable(str(error), "\n")), file=sys.stderr)
        return USER_ERROR
    return code if isinstance(code, int) else 0


def printable(text: str, kept: str = "") -> str:
    """Escape unprintable characters except `kept`: foreign text could control the terminal."""
    escaped = lambda each: each.encode("unicode_escape", "replace").decode()  # noqa: E731
    return "".join(each if each.isprintable() or each in kept else escaped(each) for each in text)


def run_alone(main: Callable[[], object], mistakes: Mistakes = (UserError, OSError)) -> NoReturn:
    """Run the main function of a single-process command and exit with its code."""
    sys.exit(exit_code_of(main, mistakes))


def did_you_mean(name: str, candidates: Collection[str], most_listed: int = 12) -> str:
    """Return a hint about an unknown name: the nearest candidate, or all if they are few."""
    close = difflib.get_close_matches(name, candidates, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; expected one of {', '.join(candidates)}" if 0 < len(candidates) <= most_listed else ""
