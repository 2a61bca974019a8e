"""Runs a command's ranks on the hosts of an allocation, attempt after attempt. The last line of a job script.

    python -m clap_ds.launch.job --folder F --launcher slurm -- clap_ds/bench.py --deepspeed_config C

Each attempt is one start of the launcher, whose exit code and what ranks and SLURM left say how it went. After a host's fault
a spare host takes over (`--spare_nodes`), the run goes on with fewer (`--shrink`), or SLURM starts the job anew without that
host. `job.json` in the folder says how it went, and so does the run directory. No torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from clap_ds.config.arguments import whole_number
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.changes import read_config, with_field
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.files import read_object, write_atomically, write_object
from clap_ds.launch import slurm
from clap_ds.launch.attempt import Ending, run_attempt, run_directory_of
from clap_ds.launch.launchers import LAUNCHERS, Launcher, check_launcher, default_launcher
from clap_ds.launch.recovery import Attempts, now
from clap_ds.ranks.distributed import SECRET
from clap_ds.ranks.hostfile import format_hostfile, read_hostfile
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import
from clap_ds.record.lock import FolderLock

CONFIG = "--deepspeed_config"
STOPS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class RunningJob:
    """One start of a job."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Read the hosts; a ValueError or UserError where they can't be used."""
        self.arguments, self.folder = arguments, arguments.folder.resolve()
        check_launcher(arguments.launcher, arguments.python)
        self.slots = read_hostfile(arguments.hostfile or self.folder / "hostfile")
        self.wanted = len(self.slots) - arguments.spare_nodes
        if self.wanted < 1:
            raise UserError(f"--spare_nodes {arguments.spare_nodes}: the allocation has {len(self.slots)} hosts")
        # Two runs in one allocation have a folder each.
        digest = hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]
        self.name = f"{slurm.job_id() or f'p{os.getpid()}'}.{digest}"
        self.stopped: signal.Signals | None = None
        self.began = time.monotonic()
        self.attempts = Attempts(int(os.environ.get("SLURM_RESTART_COUNT") or 0), self._earlier_attempts())
        self._recorded: dict[str, Any] = {
            "job": self.name, "command": arguments.command, "launcher": arguments.launcher, "hosts": self.slots,
            "state": "running", "error": None, "started": now(), "attempts": self.attempts.all,
        }  # fmt: skip

    def _earlier_attempts(self) -> list[dict[str, Any]]:
        """Those before SLURM started this job anew."""
        path = self.folder / "job.json"
        earlier = read_object(path) if path.exists() else {}
        return list(earlier.get("attempts", [])) if earlier.get("job") == self.name else []

    def run(self) -> int:
        """Run it; the job's exit code. Raises a ValueError where another job has the folder."""
        lock = FolderLock(self.folder)
        lock.acquire()
        for number in STOPS:
            signal.signal(number, self._hear)
        try:
            self._record()
            hosts = self._choose_hosts()
            while True:
                started, ending = now(), self._attempt(hosts)
                self.attempts.note(ending, hosts, [*self.slots], started)
                self._record()
                hosts = self._choose_hosts() if self.attempts.may_go_on() and not self.stopped else {}
                if not hosts:
                    return self._finish(ending)
                without = f" without {', '.join(ending.hosts)}" if ending.hosts else ""
                print(f"error: {ending.message}\nstarting again{without}", file=sys.stderr, flush=True)
        finally:
            lock.release()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.stopped = self.stopped or signal.Signals(number)

    # --- which hosts, and what they run

    def _choose_hosts(self) -> dict[str, int]:
        """Hosts of the next attempt: as many as wanted, or fewer where the job may shrink; none where that can't be."""
        excluded = self.attempts.excluded()
        good = [name for name in self.slots if name not in excluded]
        if len(good) < self.wanted and not self.attempts.of_this_start():
            good = [*self.slots]  # SLURM gave the job a host again that it was to do without
        chosen = {name: self.slots[name] for name in good[: self.wanted]}
        if len(chosen) < self.wanted:
            may_shrink = self.arguments.shrink and CONFIG in self.arguments.command
            while chosen and not (may_shrink and self._accumulation(chosen)):
                chosen.popitem()
        return chosen

    def _accumulation(self, hosts: dict[str, int]) -> int | None:
        """Accumulation steps by which fewer hosts' ranks make the same global batch; None where they can't."""
        ranks = sum(list(self.slots.values())[: self.wanted])
        everyone = ranks * BatchSizes.of(read_config(self._config()), ranks).accumulation_steps
        return everyone // sum(hosts.values()) if everyone % sum(hosts.values()) == 0 else None

    def _config(self) -> Path:
        return Path(self.arguments.command[self.arguments.command.index(CONFIG) + 1])

    def _words(self, hosts: dict[str, int], folder: Path) -> list[str]:
        """The ranks' script and arguments: with their hostfile, and with more accumulation on fewer hosts."""
        script, *words = self.arguments.command
        write_atomically(folder / "hostfile", format_hostfile(hosts))
        if CONFIG in words:
            words += ["--hostfile", str(folder / "hostfile"), "--job_folder", str(folder)]
        if len(hosts) < self.wanted:
            steps, path = self._accumulation(hosts), folder / "run.json"
            write_object(path, with_field(read_config(self._config()), "gradient_accumulation_steps", steps))
            words[words.index(CONFIG) + 1] = str(path)
            print(f"going on with {len(hosts)} of {self.wanted} hosts, {steps} accumulation steps", flush=True)
        return [script, *words]

    def _attempt(self, hosts: dict[str, int]) -> Ending:
        number, options = len(self.attempts.all), self.arguments
        folder = self.folder / "attempts" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(os.urandom(16).hex())
        launcher = Launcher(
            options.launcher, options.python, shlex.split(options.srun_options), options.cpu_bind, options.cpus_per_task,
            shlex.split(options.wrapper), options.passed, f"{self.name}.{number}",
        )  # fmt: skip
        return run_attempt(launcher, hosts, self._words(hosts, folder), folder, lambda: self.stopped)

    # --- the end

    def _finish(self, ending: Ending) -> int:
        """Say and record how it went; have SLURM start the job anew, where that is asked for."""
        message, last = ending.message, self.attempts.all[-1]
        if hosts := self.attempts.hosts_of_same_error():
            message = f"the same error on {', '.join(hosts)}, so it is the program's: {message}"
        last["requeued"] = again = self._asks_for_another_start(ending)
        run = run_directory_of(self.folder / "attempts" / str(len(self.attempts.all) - 1))
        self._record(
            state=ending.state, error=message or None, exit_code=ending.code, finished=now(),
            run_directory=str(run.path) if run else None, seconds=round(time.monotonic() - self.began, 1),
        )  # fmt: skip
        if message:
            print(f"{'error: ' if ending.code else ''}{message}", file=sys.stderr, flush=True)
        if again:
            self._start_anew()
        return ending.code

    def _asks_for_another_start(self, ending: Ending) -> bool:
        if slurm.job_id() is None or self.stopped in (signal.SIGTERM, signal.SIGINT):
            return False
        if self.arguments.until_done and ending.state == "timeout" and ending.code == 0:
            return True
        done, most = self.attempts.requeues(), self.arguments.requeues
        if self.attempts.may_be_requeued() and done >= most:
            print(
                f"SLURM isn't asked to start this job again: it was, {done} times of {most} (--requeues)",
                file=sys.stderr,
            )
        return self.attempts.may_be_requeued() and done < most

    def _start_anew(self) -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)  # SLURM ends this job before it starts it again
        without = self.attempts.excluded()
        where = f" without {', '.join(without)}" if without else ""
        if without and not slurm.enough_nodes(without):
            where, without = f", perhaps with {', '.join(without)}: the partition has no other nodes", []
        print(f"SLURM is asked to start this job again{where}", file=sys.stderr, flush=True)
        if problem := slurm.requeue(without):
            print(f"warning: {problem}", file=sys.stderr, flush=True)
            self.attempts.all[-1]["requeued"] = False
            self._record()

    def _record(self, **fields: object) -> None:
        """Merge fields into `job.json`; a job that SLURM starts anew adds its attempts to the earlier ones."""
        self._recorded.update(fields)
        self.folder.mkdir(parents=True, exist_ok=True)
        RunDirectory(self.folder).write_json("job.json", self._recorded)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("launch/job.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="of this job: its record, and a folder for each attempt")
    add("--hostfile", type=Path, help="hosts and ranks (default: hostfile in the folder)")
    add("--launcher", choices=LAUNCHERS, default=default_launcher())
    add("--srun_options", default="", metavar="WORDS", help="further options of the ranks' step")
    add("--cpu_bind", help="how ranks are bound to cores, in srun's words")
    add("--cpus_per_task", type=whole_number(), help="cores of each rank")
    add("--python", default=sys.executable, help="of the ranks, where another one than this, as in a container")
    add("--wrapper", default="", metavar="WORDS", help="before torchrun's Python, such as a container's program")
    add("--pass", dest="passed", nargs="+", default=[], metavar="NAME", help="variables that pdsh's ranks get")
    add("--spare_nodes", type=whole_number(0), default=0, metavar="K", help="hosts kept for when others fail")
    add("--shrink", action="store_true", help="go on with fewer hosts, in the same global batch")
    add("--until_done", action="store_true", help="queue training again when its time is over")
    add("--requeues", type=whole_number(0), default=0, help="how often SLURM may start it anew after a host's fault")
    add("command", nargs="+", metavar="SCRIPT …", help="after --: the ranks' script and its arguments")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return exit_code_of(lambda: RunningJob(arguments).run())


if __name__ == "__main__":
    sys.exit(main())
