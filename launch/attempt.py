"""One start of a run's ranks on some hosts: from the message that starts them to the last one's end, and why it ended.

Leaves which hosts these are, and whether there is another attempt, to `launch/job.py`.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from clap_ds.config.errors import USER_ERROR
from clap_ds.launch.agents import Agents, Host
from clap_ds.launch.connection import Message
from clap_ds.launch.recovery import Ending
from clap_ds.launch.stalls import Stack, StepWatch, describe, elsewhere
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import
from clap_ds.record.schema import Summary

RANK_LOST_S = 20.0  # that a rank may end before the others
GRACE_S = {signal.SIGUSR1: 20.0, signal.SIGTERM: 10.0, signal.SIGINT: 10.0}
"""Time for ranks to record their end (SLURM kills 30 s after SIGTERM); `--grace` allows more, for those that save."""
LOOK_S = 0.1  # between looks
STACKS_S = 8.0  # that hosts have to say where their ranks are
CLEAR_S = 20.0  # that hosts have to end an attempt
FAILED, KILLED = 1, "killed by"
_RUN_DIRECTORY = re.compile(r"^run directory: (\S.*)")
_ERROR = re.compile(r"(error: |[\w.]*(Error|Exception): ).*")
_OF_THE_HOST = re.compile(
    r"NCCL|CUDA error(?!: (invalid configuration|out of memory))|uncorrectable|\bECC\b|\bXid\b"
    r"|Connection (reset|closed|refused)|[Gg]loo|Input/output error|Bus error|Stale file handle|killed by SIG(KILL|BUS|SEGV)"
)
"""What an error says that may well be a host's fault, not the program's."""


class Attempt:
    """
    Args:
        start: the message that starts the ranks; its `slots` are the hosts, in the order of their ranks.
        signalled: which signal the job was sent, if any.
        grace_s: after a signal, for ranks that save.
    """

    def __init__(
        self,
        agents: Agents,
        start: Message,
        signalled: Callable[[], signal.Signals | None],
        grace_s: float,
        folder: Path,
    ) -> None:
        self.agents, self.start, self.hosts = agents, start, list(start["slots"])
        self.run_directory: Path | None = None
        self._signalled, self._grace_s, self._folder = signalled, grace_s, folder
        self._began = time.monotonic()
        self._failed: list[tuple[float, Host]] = []
        self._steps = StepWatch()
        self._stacks: list[Stack] = []
        self._said = ""  # the first error that a rank printed

    def hear(self, message: Message) -> None:
        """Called, by threads, with what hosts say that isn't about their own state."""
        host = message["host"]
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            if name in message:
                self._pass_on(host, message[name], stream)
        if not self._said and (found := _ERROR.match(message.get("err", ""))):
            self._said = found[0].removeprefix("error: ")[:500]
        if "waits" in message:
            print(f"{host} waits {message['waits']}", file=sys.stderr, flush=True)
        elif "stacks" in message:
            step = message.get("step", 0)
            self._stacks.append(Stack(message["rank"], host, message["state"], step, message["stacks"]))

    def _pass_on(self, host: str, line: str, stream: IO[str]) -> None:
        """Copy a line of the ranks', having noted what it says: who reads of the run there finds it known here."""
        if self.run_directory is None and (found := _RUN_DIRECTORY.search(line)):
            self.run_directory = Path(found.group(1).strip())
            self.agents.say(do="monitor", run_directory=str(self.run_directory))
        stream.write(f"{host}: {line}\n" if len(self.hosts) > 1 else line + "\n")
        stream.flush()

    # --- running

    def run(self) -> Ending:
        """Start the ranks, watch them to their end, leave none behind."""
        for name in self.hosts:
            self.agents.hosts[name].begin(self.start["attempt"])
        self.agents.say(**self.start)
        reason = None
        while reason is None and self._signalled() is None and not self._all_ended():
            reason = self._reason_to_end()
            time.sleep(LOOK_S)
        number = self._signalled()
        if number is not None and not self._all_ended():
            self._wait_for_last_words(number)
        unconfirmed = self.agents.end_attempt(self.hosts, CLEAR_S)
        for name in set(unconfirmed) - set(reason.hosts if reason else []):
            print(f"warning: {name} didn't confirm that its processes are gone", file=sys.stderr, flush=True)
        ending = self._conclude(reason or (self._signal_ending(number) if number is not None else None))
        self._complete_run_record(ending)
        return ending

    def _wait_for_last_words(self, number: signal.Signals) -> None:
        self.agents.say(do="signal", number=int(number))
        until, sent = time.monotonic() + max(GRACE_S[number], self._grace_s), self.agents.clock.now()
        hosts = [self.agents.hosts[name] for name in self.hosts]
        while not self._all_ended() and time.monotonic() < until:
            # Of ranks that have only just started, none may have said anything before the signal.
            if all((host.heard or 0.0) > sent and not host.notes for host in hosts):
                break
            time.sleep(LOOK_S)

    def _all_ended(self) -> bool:
        return all(self.agents.hosts[name].ended is not None for name in self.hosts)

    def _reason_to_end(self) -> Ending | None:
        """Why the ranks are to be ended now, if they are, but for a signal."""
        now, hosts = time.monotonic(), [self.agents.hosts[name] for name in self.hosts]
        if lost := self.agents.lost(self.hosts):
            reasons = "; ".join(f"{name}: {why}" for name, why in lost.items())
            return Ending("failed", f"lost {reasons}", FAILED, list(lost), lost=True)
        known = [host for _, host in self._failed]
        self._failed += [(now, host) for host in hosts if host.ended and host.ended[0] and host not in known]
        if self._failed and now - self._failed[0][0] > RANK_LOST_S:
            host = self._failed[0][1]
            message = f"{_how_ended(host)}; the other hosts went on waiting for it"
            return Ending("failed", message, FAILED, [host.name])
        short = [host for host in self.agents.short_of_ranks(RANK_LOST_S) if host in hosts]
        busy = [note for host in hosts for note in list(host.notes.values()) if note.get("doing") != "ending"]
        if short and not self._failed and busy:
            left = "; ".join(f"{host.name} has {len(host.notes)} of {host.most_ranks} ranks left" for host in short)
            return Ending("failed", f"ranks ended while others went on: {left}", FAILED, [short[0].name])
        notes = [note for host in hosts for note in list(host.notes.values())]
        if len(notes) == sum(self.start["slots"].values()) and (stalled_s := self._steps.stalled(notes, now)):
            return self._stall_ending(stalled_s, len(notes))
        return None

    def _stall_ending(self, stalled_s: float, num_ranks: int) -> Ending:
        """Have all ranks write where they are, keep it, and name those that stand elsewhere than the rest."""
        self._stacks.clear()
        self.agents.say(do="stacks")
        until = time.monotonic() + STACKS_S
        while len(self._stacks) < num_ranks and time.monotonic() < until and self._signalled() is None:
            time.sleep(LOOK_S)
        stacks = sorted(self._stacks, key=lambda stack: stack.rank)
        folder = (self.run_directory or self._folder) / "stacks"
        message = describe(stalled_s, self._steps.usual_step_s(), stacks)
        try:
            folder.mkdir(exist_ok=True)
            for stack in stacks:
                first = f"# rank {stack.rank} on {stack.host}, {time.strftime('%F %T')}: {stack.where()}\n"
                (folder / f"rank{stack.rank}.txt").write_text(first + stack.text)
            message += f"; all stacks are in {folder}"
        except OSError as error:
            message += f"; the stacks can't be kept: {error}"
        return Ending("failed", message, FAILED, list(dict.fromkeys(stack.host for stack in elsewhere(stacks))))

    def _signal_ending(self, number: signal.Signals) -> Ending:
        message = f"stopped by {number.name}, {time.monotonic() - self._began:.0f} s after its start"
        return Ending("timeout" if number == signal.SIGUSR1 else "terminated", message, 128 + number)

    # --- how it went

    def _conclude(self, ending: Ending | None) -> Ending:
        """How it ended: by why it was ended, if it was, the launchers' exit codes, and what the run recorded."""
        summary, problem = self._summary()
        state, error = summary.get("state"), summary.get("error") or problem
        failed = [self.agents.hosts[name] for name in self.hosts if (self.agents.hosts[name].ended or (0, ""))[0]]
        if state == "completed" and not failed and (ending is None or not ending.hosts):
            return Ending("completed", "", 0)
        if ending is not None:
            if ending.state == "timeout" and state == "timeout" and _saved(summary):
                return Ending("timeout", f"{ending.message}, and saved at step {summary.get('step')}", 0)
            if state in (None, "running", "completed", "terminated") or self._signalled() is not None:
                return ending
            return Ending(
                state, f"{ending.message} ({error})" if error else ending.message, FAILED, ending.hosts, ending.lost
            )
        if not failed and state is None and problem is None:
            return Ending("completed", "", 0)  # a command without a run directory has only its code
        order = [host for _, host in self._failed] + failed
        if not order:
            return Ending(
                "failed", error or "the ranks ended with code 0, though the run never said that it was over", FAILED
            )
        first = next((host for host in self.agents.short_of_ranks() if host in failed), order[0])
        code, how = (order[0].ended or (FAILED, ""))[0], _how_ended(first)
        if state in (None, "running", "terminated", "completed"):
            # A launcher ends the others with SIGTERM when one fails.
            more = error if state is None and error else self._said
            message = how + (f"; {more}" if more and more not in how else "")
            state = "failed"
        else:
            where = f"{_first_ranks(first)} on {first.name} ended first; " if len(self.hosts) > 1 else ""
            # Of ranks that were killed, the others know only that they are gone.
            message = f"{how}; {error}" if error and KILLED in how else where + error if error else how
        at_fault = code != USER_ERROR and state == "failed" and _OF_THE_HOST.search(f"{message} {how}")
        return Ending(state, message, code, [first.name] if at_fault else [])

    def _summary(self) -> tuple[Summary, str | None]:
        """What the run recorded, and what is wrong with the record."""
        try:
            return (RunDirectory(self.run_directory).summary() if self.run_directory else {}), None
        except (OSError, ValueError) as error:
            return {}, f"{self.run_directory}/summary.json can't be read: {error}"

    def _complete_run_record(self, ending: Ending) -> None:
        """Have the run directory say how the run ended, where its ranks couldn't or didn't know the cause."""
        if self.run_directory is not None:
            try:
                run = RunDirectory(self.run_directory)
                run.finish(ending.state, ending.message or None)
                knows_more = self._signalled() is None and ending.state != "completed"
                if knows_more or run.summary().get("state") != ending.state:
                    run.update_summary(state=ending.state, error=ending.message or None)
            except (OSError, ValueError) as error:
                # However that goes, the job's own record and exit code tell how it ended.
                print(f"warning: {self.run_directory}: {error}", file=sys.stderr, flush=True)


def _saved(summary: Summary) -> bool:
    checkpoints: list[Any] = summary.get("checkpoints") or []
    return bool(checkpoints and checkpoints[-1].get("saved"))


def _how_ended(host: Host) -> str:
    code, why = host.ended or (FAILED, "")
    # DeepSpeed's launcher makes 247 of SIGKILL, a shell 137.
    number = 256 - code if 0 < 256 - code < 32 else code - 128
    killed = f" ({KILLED} {signal.Signals(number).name})" if number in set(signal.Signals) else ""
    who = f"{_first_ranks(host)} ended first, with" if host.first_gone and killed else "its ranks ended with"
    return f"{host.name}: {who} code {code}{killed}" + (f": {why}" if why else "")


def _first_ranks(host: Host) -> str:
    return f"rank {', '.join(map(str, host.first_gone))}" if host.first_gone else "a rank"
