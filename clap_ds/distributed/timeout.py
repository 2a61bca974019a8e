"""Run calls that may never return, such as on a dead file system, with a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, task: Callable[[], T]) -> T:
    """Return or raise what a task does, or TimeoutError after `limit_s`; the task then continues in a daemon thread."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError as error:
        raise error if future.done() else TimeoutError(f"no answer within {limit_s:g} s") from None
