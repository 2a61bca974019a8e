import subprocess
import sys

import pytest

from clap_ds.ranks.limits import within
from tests.processes import ROOT


def test_gives_and_raises_what_the_task_does() -> None:
    def own() -> None:
        raise TimeoutError("the task's own")

    assert within(30, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="the task's own"):
        within(30, own)
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 // 0)


def test_neither_the_caller_nor_the_end_of_the_process_waits_for_what_never_answers() -> None:
    program = """
import threading
from clap_ds.ranks.limits import within
try:
    within(0.1, threading.Event().wait)
except TimeoutError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=180, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "no answer within 0.1 s\n")
