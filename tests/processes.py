"""Commands in processes of their own, forked from one that has imported torch, DeepSpeed and transformers already.

Starting Python and importing them takes 5 s of a processor, many times what most commands under test then do. A few tests start
Python itself, under every launcher; the others run the same files here, with the arguments, environment, folder, signals and
exit codes that a process of their own has.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from clap_ds.dist.rendezvous import free_port

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 180


def warm_context() -> ForkServerContext:
    """Processes start from one that has imported `tests.preload`; it lives as long as this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


_started: list[Command] = []


def end_all() -> None:
    """Kill what a failed test has left running."""
    for command in _started:
        command.kill()
    _started.clear()


class Command:
    """A Python command that runs, with what `subprocess.Popen` has of it.

    Args:
        arguments: as Python gets them: a file, `-m` and a module or `-c` and a program, and what follows.
        env: the whole environment.
        constants: other values for constants of modules (`module.NAME`), such as a time to wait for somebody.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        constants: Mapping[str, object] | None = None,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self._folder = tempfile.TemporaryDirectory()
        files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        self._stdout, self._stderr = files
        environment = dict(os.environ if env is None else env)
        self._process = warm_context().Process(
            target=_become, args=(self.args, environment, str(cwd), *map(str, files), dict(constants or {}))
        )
        self._process.start()
        _started.append(self)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Its exit code, or the number of the signal that ended it, negative.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout, self.stdout.encode(), self.stderr.encode())
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        """All it has written so far."""
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()


def ranks(
    arguments: Sequence[str | Path],
    world_size: int,
    *,
    env: Mapping[str, str],
    constants: Mapping[str, object] | None = None,
) -> list[Command]:
    """A command on every rank of this machine, as launchers start it. None of them ends the others when one has ended."""
    port = str(free_port())
    place = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Command(arguments, env={**env, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, constants=constants)
        for rank in range(world_size)
    ]


def run(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    constants: Mapping[str, object] | None = None,
    check: bool = False,
    timeout: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does; one that takes longer than `timeout` is killed."""
    command = Command(arguments, env=env, cwd=cwd, constants=constants)
    try:
        code = command.wait(timeout)
    finally:
        command.kill()
    done = subprocess.CompletedProcess(command.args, code, command.stdout, command.stderr)
    assert not check or code == 0, done.stdout + done.stderr
    return done


def _become(
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    stdout: str,
    stderr: str,
    constants: dict[str, object],
) -> None:
    """In the forked process: take on what a new process is given, and run the command."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for path, number in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # the platform's, where this process's own would be handed down

    import torch

    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(sys.modules[module], constant), name
        setattr(sys.modules[module], constant, value)
    if arguments[0] == "-c":
        sys.path[0] = cwd
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.path[0] = cwd
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # imported already, where others import it
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
