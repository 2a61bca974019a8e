"""Bounded waits for what may never answer, such as a file system whose server is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, task: Callable[[], T]) -> T:
    """What a task gives or raises; TimeoutError where it takes longer. It then goes on in a thread that nobody waits for."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # for who waits to handle
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError as error:
        raise error if future.done() else TimeoutError(f"no answer within {limit_s:g} s") from None
