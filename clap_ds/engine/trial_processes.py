"""Child processes that answer questions, a line of JSON each: several at a time, within limits; who fails costs one answer.

A child that ends, hangs or talks nonsense is killed with all it has started and replaced, a bounded number of times; the answer
to its question says so. Knows nothing of what is asked. Standard library only.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

Question = dict[str, Any]
Answer = dict[str, Any]
END_LIMIT_S = 5.0
"""For a process that is through, or has been killed."""
MOST_BYTES = 2**16
"""Of a line."""


class Child:
    """A process that says `{}` once it is ready, then a line of JSON for every line it gets; `ends` in one: it does so now.

    Attributes:
        question: number of the one it is at, None while it has none.
        asked_s: when it got that, by the monotonic clock.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.is_ready = False
        self.question: int | None = None
        self.asked_s = 0.0
        self._heard = b""

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def ask(self, number: int, question: Question) -> None:
        assert self.process.stdin is not None
        self.question, self.asked_s = number, time.monotonic()
        with suppress(OSError):  # it has ended, which `hear` says
            self.process.stdin.write(json.dumps(question).encode() + b"\n")

    def hear(self) -> Answer | None:
        """A whole line if there is one by now; raises EOFError, saying why, where no more will come."""
        some = os.read(self.fileno(), MOST_BYTES)
        self._heard += some
        if not some:
            raise EOFError(self._end())
        if not self._heard.endswith(b"\n"):
            return None
        line, self._heard = self._heard, b""
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise EOFError(f"its process said {line[:80]!r}") from None

    def _end(self) -> str:
        try:
            code = self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "its process says no more"
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return ": ".join([f"its process ended {how}", *last])

    @property
    def was_stopped(self) -> bool:
        """By somebody else: a person, or a system without memory."""
        return self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    def kill(self) -> None:
        """And all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the driver may hold it back, whom nobody can hurry
            self.process.wait(END_LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


class Crew:
    """Children that share questions; they end with the block of code.

    Args:
        command: of a child.
        most_lost: children that may be lost; after that no further question is asked.

    Attributes:
        problem: what the last child that was lost ended of, None where none was.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, most_lost: int = 4) -> None:
        self._command, self._environment, self._spare = command, environment, most_lost
        self._children: list[Child] = []
        self.problem: str | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keep(0)

    def prepare(self, number: int) -> None:
        """Have so many children get ready for questions to come."""
        while len(self._children) < number and self._spare > 0:
            self._start()

    def ask(
        self, questions: Sequence[Question], *, num_children: int, limit_s: float, until_s: float
    ) -> dict[int, Answer]:
        """Answers by the question's number, in the order they came; `{"problem": …}` where a child was lost over it, with
        `passing` where somebody else has stopped it or it took too long: another try may end otherwise.

        Args:
            num_children: most of them at a time; those beyond end.
            limit_s: for each answer.
            until_s: when to stop, by the monotonic clock: what isn't answered by then has no answer.
        """
        self._keep(num_children)
        waiting, answers = deque(range(len(questions))), dict[int, Answer]()
        while len(answers) < len(questions) and time.monotonic() < until_s:
            busy = sum(child.question is not None for child in self._children)
            self.prepare(min(num_children, busy + len(waiting)))
            for child in self._children:
                if child.is_ready and child.question is None and waiting:
                    number = waiting.popleft()
                    child.ask(number, questions[number])
            if not self._children:
                break
            self._hear(answers, limit_s, until_s)
        for child in [child for child in self._children if child.question is not None or not child.is_ready]:
            self._drop(child)  # an answer that is late would be taken for another question's
        return answers

    def _start(self) -> None:
        try:
            self._children.append(Child(self._command, self._environment))
        except OSError as error:
            self.problem, self._spare = str(error), 0

    def _hear(self, answers: dict[int, Answer], limit_s: float, until_s: float) -> None:
        """Wait until a child says something, or is late."""
        asked = [child.asked_s + limit_s for child in self._children if child.question is not None]
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child, selectors.EVENT_READ)
            timeout = max(0.0, min([until_s, *asked]) - time.monotonic())
            heard: list[Child] = [key.fileobj for key, _ in selector.select(timeout)]  # type: ignore[misc]
        for child in heard:
            number = child.question
            try:
                found = child.hear()
            except EOFError as error:
                found = {"problem": str(error), "ends": True, "passing": child.was_stopped}
            if found is None:
                continue
            if found.pop("ends", False):
                self._lose(child, found["problem"])
            child.is_ready, child.question = True, None
            if number is not None:
                answers[number] = found
        now_s = time.monotonic()
        for child in [each for each in self._children if each.question is not None and now_s >= each.asked_s + limit_s]:
            assert child.question is not None
            answers[child.question] = {"problem": f"no end within {limit_s:g} s", "passing": True}
            self._lose(child, f"no end within {limit_s:g} s")

    def _lose(self, child: Child, problem: str) -> None:
        self.problem = problem
        self._spare -= 1
        self._drop(child)

    def _drop(self, child: Child) -> None:
        self._children.remove(child)
        child.kill()

    def _keep(self, most: int) -> None:
        while len(self._children) > most:
            self._drop(self._children[-1])
