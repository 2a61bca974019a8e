"""Has kernels tried by processes of their own (`kernel_trials`): several at a time say which are right, then one alone how long
these take, all within a limit. What fails costs itself; what isn't found out stays open. Whose kernels, and what comes of it,
is left to `kernels`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from clap_ds.config.places import PACKAGE
from clap_ds.config.settings import RunSettings
from clap_ds.engine import kernel_trials
from clap_ds.engine.kernel_trials import Site, to_json

TIME_LIMIT_S = 27.0
OVER = "time was over"
CHECKING_SHARE = 0.65
"""Of the time limit: what is known to be right by then is timed."""
END_LIMIT_S = 1.0
"""For processes that were killed: the driver may hold them back, whom nobody can hurry."""
POLL_S = 0.02
MOST_CHILDREN = 8
BYTES_OF_A_CHILD = 2**30
"""On the GPU before any tensor."""
TENSORS_OF_A_TRIAL = 6
"""Memory of a trial, in tensors as large as an MLP's hidden layer, 4 times its input."""

Found = dict[str, float | str]
"""By kernel: seconds, or what is wrong with it."""
Pair = tuple[Site, str]
"""Of a site and a kernel for it."""
Answer = dict[str, Any]
"""As `kernel_trials` gives it."""


@dataclass(frozen=True)
class Conditions:
    """What a trial's outcome depends on beside the site."""

    device: torch.device
    dtype: torch.dtype
    clips: int

    @classmethod
    def of(cls, run: RunSettings, device: torch.device) -> Conditions:
        """The run's micro-batch, and the dtype its modules compute in."""
        name = run.precision.removeprefix("torch_autocast_")
        dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name))
        return cls(device, dtype, run.micro_batch)

    def __str__(self) -> str:
        return f"{self.clips} clips, {str(self.dtype).removeprefix('torch.')}"


def try_kernels(known: dict[Site, Found], conditions: Conditions) -> str | None:
    """Add what can be found out in `TIME_LIMIT_S` to what is known; gives back what stood in the way of knowing all.

    Each process that compares kernels has a share of the sites. The one that times them gets ready meanwhile.
    """
    until_s = time.monotonic() + TIME_LIMIT_S
    number = _num_children(known, conditions)
    of_sites = [[(site, name) for name in untried(site, found)] for site, found in known.items()]
    shares = [list(itertools.chain(*of_sites[first::number])) for first in range(number)]
    answers, problems, timing = dict[Pair, Answer](), list[str](), list[_Child]()
    try:
        timing.append(_Child(conditions))
        others = (_Child(conditions) for _ in itertools.count())
        _ask("check", shares, until_s - (1 - CHECKING_SHARE) * TIME_LIMIT_S, answers, others)
        right = [pair for pair in itertools.chain(*of_sites) if answers.get(pair) == {}]
        _ask("time", [right], until_s, answers, itertools.chain(timing, others))
    except OSError as error:  # no further process, or no room for what it says
        problems.append(str(error))
    finally:
        _kill(timing)
    for (site, name), answer in answers.items():
        if answer.get("passing"):
            problems.append(f"{name} at {site}: {answer['problem']}")
        elif answer:
            known[site][name] = answer.get("problem") or answer["seconds"]
    is_complete = not any(untried(site, found) for site, found in known.items())
    return None if is_complete else next(iter(problems), OVER)


def untried(site: Site, found: Mapping[str, Any]) -> list[str]:
    """Names of the site's kernels of which nothing is known."""
    return [name for name in map(str, site.candidates()) if name not in found]


class _Child:
    """A process that is told once what to try, and is gone when this one is."""

    def __init__(self, conditions: Conditions) -> None:
        self._said, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            _command(conditions), env=_environment(), start_new_session=True,
            stdin=subprocess.PIPE, stdout=self._said, stderr=self._log,
        )  # fmt: skip
        self.was_late = False

    def ask(self, what: str, pairs: list[Pair]) -> None:
        self._pairs = pairs
        questions = [{"site": to_json(site), "kernel": name, "what": what} for site, name in pairs]
        assert self.process.stdin is not None
        with suppress(OSError), self.process.stdin as pipe:  # it has ended, which `finish` says
            pipe.write(json.dumps(questions).encode())

    @property
    def answers(self) -> list[Answer] | None:
        """So far, in the questions' order; None before it was ready."""
        _, ready, said = os.pread(self._said.fileno(), 2**20, 0).partition(b"{}\n")
        return [json.loads(line) for line in said.split(b"\n")[:-1]] if ready else None

    @property
    def is_through(self) -> bool:
        """With its questions, though the driver may hold it back at its end, or with itself."""
        return self.process.poll() is not None or len(self.answers or []) == len(self._pairs)

    def finish(self, answers: dict[Pair, Answer]) -> list[Pair]:
        """Add its answers and, to the question it ended over, how; gives back those left for another."""
        own, code = self.answers, self.process.returncode
        answers.update(zip(self._pairs, own or [], strict=False))
        left = self._pairs[len(own or []) :]
        if not left or (code == 0 and own):  # after an answer it may give up by itself
            return left
        # Stopped, here or by somebody else (a person, a system without memory), or not begun: another try may end otherwise.
        is_passing = self.was_late or own is None or code in (-signal.SIGKILL, -signal.SIGTERM)
        answers[left[0]] = {"problem": OVER if self.was_late else self._end(code), "passing": is_passing}
        return [] if is_passing else left[1:]

    def _end(self, code: int) -> str:
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return ": ".join([f"its process ended {how}", *last])


def _ask(
    what: str, shares: list[list[Pair]], until_s: float, answers: dict[Pair, Answer], start: Iterator[_Child]
) -> None:
    """Have each share answered by a process, and what that leaves by another, until then."""
    waiting, children, running = [share for share in shares if share], list[_Child](), list[_Child]()
    try:
        while (waiting or running) and time.monotonic() < until_s:
            for share in waiting:
                children.append(next(start))
                children[-1].ask(what, share)
                running.append(children[-1])
            through = [child for child in running if child.is_through]
            running = [child for child in running if child not in through]
            waiting = [left for child in through if (left := child.finish(answers))]
            time.sleep(POLL_S)
    finally:
        _kill(children)
    for child in running:
        child.finish(answers)


def _kill(children: Sequence[_Child]) -> None:
    """And all that they have started; those that have ended are left."""
    late = [child for child in children if child.process.poll() is None]
    for child in late:
        child.was_late = True
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
    until_s = time.monotonic() + END_LIMIT_S
    for child in late:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, until_s - time.monotonic()))


def _command(conditions: Conditions) -> list[str]:
    dtype = str(conditions.dtype).removeprefix("torch.")
    setup = {"device": str(conditions.device), "dtype": dtype, "clips": conditions.clips, "parent": os.getpid()}
    return [sys.executable, "-P", "-m", kernel_trials.__name__, json.dumps(setup)]


def _environment() -> dict[str, str]:
    """With this package where the child looks first, wherever it was found."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _num_children(sites: Mapping[Site, Any], conditions: Conditions) -> int:
    """As many as have a core and, on the GPU, memory."""
    if conditions.device.type != "cuda":
        return 1
    hidden = max(4 * site.dim * site.grid**2 for site in sites) * conditions.clips * conditions.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(conditions.device)
    room = (free - BYTES_OF_A_CHILD) // (BYTES_OF_A_CHILD + TENSORS_OF_A_TRIAL * hidden)  # one waits to time them
    return max(1, min(MOST_CHILDREN, len(os.sched_getaffinity(0)), room))
