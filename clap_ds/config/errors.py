"""What a command says of a mistake that its user can mend: one message, and the exit code 2. Standard library only."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Collection
from typing import NoReturn

USER_ERROR = 2
"""Exit code of a run refused for something its user can mend."""
INTERRUPTED = 130


class UserError(Exception):
    """A mistake to be shown as one message, without a traceback."""


class AgreedError(UserError):
    """One that every rank knows of, so that rank 0 speaks for all."""


Mistakes = tuple[type[Exception], ...]
MISTAKES: Mistakes = (UserError, ValueError, OSError)


def exit_code_of(action: Callable[[], object], mistakes: Mistakes = MISTAKES) -> int:
    """Run a command: its own exit code if it gives one, 0, 2 with one message where it raises one of `mistakes`, whose further
    lines are indented under the first, or 130 after Ctrl-C."""
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
    """Escape what isn't printable but for the characters `kept`: text that others have written could steer a terminal."""
    escaped = lambda each: each.encode("unicode_escape", "replace").decode()  # noqa: E731
    return "".join(each if each.isprintable() or each in kept else escaped(each) for each in text)


def run_alone(main: Callable[[], object], mistakes: Mistakes = (UserError, OSError)) -> NoReturn:
    """Run the main function of a command that no launcher starts, and end with its exit code."""
    sys.exit(exit_code_of(main, mistakes))


def did_you_mean(name: str, candidates: Collection[str], most_listed: int = 12) -> str:
    """What to add to a message about an unknown name: the nearest one that there is, or all of them where they are few."""
    close = difflib.get_close_matches(name, candidates, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(candidates)}" if 0 < len(candidates) <= most_listed else ""
