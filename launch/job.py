"""Runs a command's ranks on the hosts of an allocation, and sees to how that ends. The last line of a job script.

    exec python launch/job.py --site mine --folder F -- clap_ds/bench.py --deepspeed_config C

Starts an agent on each host (`launch/agents.py`), which starts the ranks there by DeepSpeed's launcher, torchrun or itself.
Signals reach every rank; a host or rank that is lost, or that the others wait for, ends the attempt with its name; then spare
hosts take over (`--spare_nodes`), the run goes on with fewer (`--shrink`), or SLURM starts the job anew without that host. No
process stays on any host, and the exit code is the run's. `job.json` in the folder says how it went, and so does the run
directory. No torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.files import read_object, write_atomically, write_object
from clap_ds.config.places import work_folder
from clap_ds.dist.hostfile import format_hostfile, hosts_from_slurm, read_hostfile, slots_from_slurm
from clap_ds.launch import slurm_job
from clap_ds.launch.agents import Agents
from clap_ds.launch.attempt import FAILED, Attempt
from clap_ds.launch.connection import Message
from clap_ds.launch.job_signals import Signals
from clap_ds.launch.launchers import python_path, this_host
from clap_ds.launch.rank_environment import rank_environment
from clap_ds.launch.recovery import Attempts, Ending, now
from clap_ds.launch.run_config import read_config, with_field
from clap_ds.launch.sites import LAUNCHERS, launcher_name, load_site
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import
from clap_ds.record.lock import FolderLock

RECONNECT_S = 20.0  # that hosts whose connection broke have to answer again
STOP_S = 20.0
CONFIG = "--deepspeed_config"


class Job:
    """One start of a job, from its hosts' first answer to their last."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Read site and hosts; a ValueError or UserError where they can't be used."""
        self.arguments, self.folder = arguments, arguments.folder.resolve()
        self.site = load_site(arguments.site)
        self.launcher = arguments.launcher or self.site.chosen_launcher()
        self.slots = self._hosts()
        self.wanted = len(self.slots) - arguments.spare_nodes
        if self.wanted < 1:
            raise UserError(f"--spare_nodes {arguments.spare_nodes}: the allocation has {len(self.slots)} hosts")
        # Two runs in one allocation have a folder each.
        digest = hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]
        self.name = f"{slurm_job.job_id() or f'p{os.getpid()}'}.{digest}"
        self.began = time.monotonic()
        self.attempt: Attempt | None = None
        is_training = any(word.endswith("train.py") for word in arguments.command)
        self.signals = Signals(self.site.warning(is_training))
        self.attempts = Attempts(int(os.environ.get("SLURM_RESTART_COUNT") or 0), self._earlier_attempts())
        self._recorded: dict[str, Any] = {
            "job": self.name, "command": arguments.command, "launcher": self.launcher, "hosts": self.slots,
            "state": "running", "error": None, "started": now(), "attempts": self.attempts.all,
        }  # fmt: skip
        step, lost_after_s = self.site.step(self.launcher), self.site.lost_after_s
        self.agents = Agents(self.name, step, lost_after_s, self._hear, folder=str(self.folder))

    def _hosts(self) -> dict[str, int]:
        if self.arguments.hostfile is not None:
            return read_hostfile(self.arguments.hostfile)
        hosts = hosts_from_slurm(os.environ)
        wanted = self.arguments.slots or self.site.gpus_per_node
        return dict(zip(hosts, slots_from_slurm(os.environ, len(hosts), wanted), strict=True))

    def _earlier_attempts(self) -> list[dict[str, Any]]:
        """Those before SLURM started this job anew."""
        path = self.folder / "job.json"
        earlier = read_object(path) if path.exists() else {}
        return list(earlier.get("attempts", [])) if earlier.get("job") == self.name else []

    def _hear(self, message: Message) -> None:
        if self.attempt is not None:
            self.attempt.hear(message)

    # --- attempts

    def run(self) -> int:
        """Run it; the job's exit code. Raises a ValueError where another job has the folder."""
        lock = FolderLock(self.folder)
        lock.acquire()
        try:
            return self._run()
        finally:
            lock.release()

    def _run(self) -> int:
        self._record()
        stopped = lambda: self.signals.received() is not None  # noqa: E731
        self.agents.connect(list(self.slots), self._start_limit_s(), stopped)
        while True:
            started, hosts = now(), self._choose_hosts()
            ending = self._run_on(hosts) if hosts else self._no_hosts()
            excluded = ending.hosts
            if ending.lost and not stopped():
                # A connection may break of a host that is well.
                broken = [name for name in ending.hosts if not self.agents.hosts[name].is_silent]
                there = {*broken} - {host.name for host in self.agents.connect(broken, RECONNECT_S, stopped)}
                excluded = [name for name in ending.hosts if name not in there]
            self.attempts.note(ending, hosts, self.slots, started, excluded)
            self._record()
            if stopped() or not hosts or not self.attempts.may_go_on() or not self._choose_hosts():
                return self._finish(ending)
            without = f" without {', '.join(excluded)}" if excluded else ""
            print(f"error: {ending.message}\nstarting again{without}", file=sys.stderr, flush=True)

    def _start_limit_s(self) -> float:
        return float(self.site.start_limit_s or 120 + len(self.slots) / 4)

    def _choose_hosts(self) -> dict[str, int]:
        """Hosts of the next attempt: as many as wanted, or fewer where the job may shrink; none where that can't be."""
        known, excluded = self.agents.hosts, self.attempts.excluded()
        up = [name for name in self.slots if known[name].heard is not None and known[name].lost is None]
        good = [name for name in up if name not in excluded]
        if len(good) < self.wanted and not self.attempts.of_this_start():
            good = up  # SLURM gave the job a host again that it was to do without
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

    def _command(self, hosts: dict[str, int]) -> list[str]:
        """The ranks' script and arguments: with the hostfile, and with more accumulation on fewer hosts."""
        command = list(self.arguments.command)
        write_atomically(self.folder / "hostfile", format_hostfile(hosts))
        if CONFIG in command and "--hostfile" not in command:
            command += ["--hostfile", str(self.folder / "hostfile")]
        if len(hosts) < self.wanted:
            steps, path = self._accumulation(hosts), self.folder / f"config-{len(hosts)}.json"
            write_object(path, with_field(read_config(self._config()), "gradient_accumulation_steps", steps))
            command[command.index(CONFIG) + 1] = str(path)
            print(f"going on with {len(hosts)} of {self.wanted} hosts, {steps} accumulation steps", flush=True)
        return command

    def _run_on(self, hosts: dict[str, int]) -> Ending:
        start, signals = self._start_message(hosts), self.signals
        self.attempt = Attempt(self.agents, start, signals.received, self.arguments.grace, self.folder)
        return self.attempt.run()

    def _start_message(self, hosts: dict[str, int]) -> Message:
        name = f"{self.name}.{len(self.attempts.all)}"
        command, site = self._command(hosts), self.site
        files = [path for path in (Path(work_folder(), word) for word in command) if os.path.isfile(path)]
        environment = rank_environment(os.environ, site.environment, site.not_passed)
        environment |= {
            "PYTHONPATH": python_path(),
            "PYTHONUNBUFFERED": "1",
            "CLAP_START_LIMIT_S": str(self._start_limit_s()),
        }
        return {
            "do": "start", "attempt": name, "launcher": self.launcher, "slots": hosts, "gpus": slurm_job.gpus_by_host(),
            "address": next(iter(hosts)), "port": port_of(name), "wrapper": site.wrapper, "python": site.interpreter(),
            "command": command, "environment": environment, "folder": str(work_folder()), "job_host": this_host(),
            "files": {str(path): path.stat().st_size for path in files}, "start_limit_s": self._start_limit_s(),
        }  # fmt: skip

    def _no_hosts(self) -> Ending:
        """No attempt can be made: who isn't there."""
        if number := self.signals.received():
            return Ending("terminated", f"stopped by {number.name} before it began", 128 + number)
        missing = [host for host in self.agents.hosts.values() if host.heard is None or host.lost is not None]
        reasons = "; ".join(f"{host.name} ({host.lost or host.last_words or 'no answer'})" for host in missing)
        message = f"{len(missing)} of {len(self.slots)} hosts can't be reached: {reasons}"
        return Ending("failed", message, FAILED, [host.name for host in missing], lost=True)

    # --- the end

    def _finish(self, ending: Ending) -> int:
        """Let the hosts go; say and record how it went; have SLURM start the job anew, where that is asked for."""
        began, message = time.monotonic(), ending.message
        if hosts := self.attempts.hosts_of_same_error():
            message = f"the same error on {', '.join(hosts)}, so it is the program's: {message}"
        unconfirmed = self.agents.stop(timeout_s=STOP_S)
        run_directory = self.attempt.run_directory if self.attempt else None
        self.attempts.all[-1]["requeued"] = again = self._asks_for_another_start(ending)
        self._record(
            state=ending.state, error=message or None, exit_code=ending.code, finished=now(), unconfirmed=unconfirmed,
            run_directory=str(run_directory) if run_directory else None, seconds=round(time.monotonic() - self.began, 1),
            seconds_to_stop=round(time.monotonic() - began, 1),
        )  # fmt: skip
        if message:
            print(f"{'error: ' if ending.code else ''}{message}", file=sys.stderr, flush=True)
        for name in unconfirmed:
            print(f"warning: {name} didn't confirm that its processes are gone", file=sys.stderr, flush=True)
        if again:
            self._start_anew()
        return ending.code

    def _asks_for_another_start(self, ending: Ending) -> bool:
        if slurm_job.job_id() is None or self.signals.received() in (signal.SIGTERM, signal.SIGINT):
            return False
        most = self.site.requeues if self.arguments.requeues is None else self.arguments.requeues
        done_later = self.arguments.until_done and ending.state == "timeout" and ending.code == 0
        return done_later or self.attempts.may_be_requeued(most)

    def _start_anew(self) -> None:
        self.signals.ignore()  # SLURM ends this job before it starts it again
        without = self.attempts.excluded()
        where = f" without {', '.join(without)}" if without else ""
        if without and not slurm_job.enough_nodes(without):
            where, without = f", perhaps with {', '.join(without)}: the partition has no other nodes", []
        print(f"SLURM is asked to start this job again{where}", file=sys.stderr, flush=True)
        if problem := slurm_job.requeue(without):
            print(f"warning: {problem}", file=sys.stderr, flush=True)
            self.attempts.all[-1]["requeued"] = False
            self._record()

    def _record(self, **fields: object) -> None:
        """Merge fields into `job.json`; a job that SLURM starts anew adds its attempts to the earlier ones."""
        self._recorded.update(fields)
        self.folder.mkdir(parents=True, exist_ok=True)
        RunDirectory(self.folder).write_json("job.json", self._recorded)


def port_of(name: str) -> int:
    """A port for rank 0, below those the kernel gives out: another one for each run and attempt."""
    return 16000 + zlib.crc32(name.encode()) % 16000


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/job.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--site", default="generic", help="name under launch/clusters/, or a file")
    add("--folder", type=Path, required=True, help="the job's own folder, on a shared file system")
    add("--hostfile", type=Path, help="hosts and their ranks, in place of the allocation's")
    add("--slots", type=int, metavar="N", help="ranks on each host of the allocation")
    add("--launcher", type=launcher_name, choices=LAUNCHERS, help="in place of the site's")
    add("--grace", type=float, default=0.0, metavar="S", help="seconds to save after a signal")
    add("--spare_nodes", type=int, default=0, metavar="K", help="hosts of the allocation that take over from lost ones")
    add("--shrink", action="store_true", help="go on with fewer hosts, keeping the global batch by accumulation")
    add("--requeues", type=int, metavar="N", help="how often SLURM may start the job anew after losing a host")
    add("--until_done", action="store_true", help="have SLURM start it anew when its time is over, until it completes")
    add("command", nargs="+", help="-- script and its arguments")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return exit_code_of(lambda: Job(arguments).run())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
