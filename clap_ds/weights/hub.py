"""Load `transformers` models and tokenizers from a folder, the local Hub cache or the Hub, in this order.

`transformers` itself contacts the Hub first and hangs if a firewall drops packets. Here the Hub comes last, and only if it
answers within a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants, get_session

from clap_ds.distributed.timeout import within

ANSWER_S = 4.0
"""Time limit of the Hub's first answer, in seconds."""
OFFLINE = (
    "Without a network, name a local folder, or set HF_HOME to a cache folder that contains it, and HF_HUB_OFFLINE=1"
)

T = TypeVar("T")


def load_by_name(name: str, load: Callable[[bool], T], *, field: str, what: str) -> T:
    """Return `load(local_files_only)`, a `from_pretrained` of transformers, from the first place that has `name`.

    Raises ValueError, with `field`, `what` and the places searched, if `name` isn't found or can't be loaded.
    """
    folder = Path(name)
    try:
        with _offline():
            return load(True)
    except Exception as error:  # a damaged folder raises various errors
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
    """Act as with HF_HUB_OFFLINE=1: with `local_files_only` alone, transformers still contacts the Hub for 3 s or more."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def problem_with_hub() -> str | None:
    """Return why the Hub can't be contacted, or None if it answers, even with an error."""
    if constants.HF_HUB_OFFLINE:
        return "not contacted because HF_HUB_OFFLINE=1 is set"
    try:
        within(ANSWER_S, lambda: get_session().head(constants.ENDPOINT, timeout=2 * ANSWER_S))
    except Exception as error:  # the HTTP package raises various errors
        return f"{constants.ENDPOINT} can't be reached ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
