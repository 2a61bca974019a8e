"""What `transformers` loads by name: from a folder, from the hub's cache on this host or from the hub, the first that has it.

By itself it asks the hub first, and waits for ever for a network that swallows packets. Here the hub is asked last, and only
once it has given any answer, for which there is a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants, get_session

from clap_ds.distributed.timeout import within

ANSWER_S = 4.0
"""Longest that the hub may take for a first answer."""
OFFLINE = (
    "Without a network, name a local folder, or set HF_HOME to the folder of a cache that has it, and HF_HUB_OFFLINE=1"
)

T = TypeVar("T")


def load_by_name(name: str, load: Callable[[bool], T], *, field: str, what: str) -> T:
    """What `load(local_files_only)`, one of transformers' `from_pretrained`, gives for the first place that has it.

    A ValueError where none has, or it can't be loaded, says where it was looked for; `field` and `what` are for it.
    """
    folder = Path(name)
    try:
        with _offline():
            return load(True)
    except Exception as error:  # whatever a damaged folder makes transformers raise
        if folder.is_dir():
            reason = f"holds no {what} transformers can load: {_first_line(error)}"
            raise ValueError(f"{field}: the folder {name!r} {reason}") from error
    tried = f"no such folder in {Path.cwd()}"
    if not (folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2):
        problem = problem_with_hub()
        if problem is None:
            try:
                return load(False)
            except (OSError, ValueError) as error:
                problem = _first_line(error)
        else:
            problem += f". {OFFLINE}"
        tried += f"; not in the hub's local cache, {constants.HF_HUB_CACHE}; the hub: {problem}"
    raise ValueError(f"{field}: no {what} {name!r}; tried: {tried}")


@contextmanager
def _offline() -> Iterator[None]:
    """As with HF_HUB_OFFLINE=1: even with `local_files_only` the hub is asked for a list of callers, for 3 s or more."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def problem_with_hub() -> str | None:
    """Why the hub can't be asked; None where it gives an answer, whatever it is."""
    if constants.HF_HUB_OFFLINE:
        return "not asked, as HF_HUB_OFFLINE=1 is set"
    try:
        within(ANSWER_S, lambda: get_session().head(constants.ENDPOINT, timeout=2 * ANSWER_S))
    except Exception as error:  # whatever the HTTP package raises
        return f"{constants.ENDPOINT} can't be reached ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
