"""Run commands in processes forked from one that has imported torch, DeepSpeed and transformers.

These imports take 5 CPU seconds, much longer than most commands under test. A few tests start
Python itself under every launcher; others run the same files here, with their own arguments,
environment, folder, signals and exit codes.
"""

from __future__ import annotations

import contextlib
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

import pytest

from clap_ds.distributed.hostfile import free_port

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600  # DeepSpeed compiles its optimizer in one test, for minutes on a busy machine
Arguments = Sequence[str | Path]
Constants = Mapping[str, object] | None


def warm_context() -> ForkServerContext:
    """Return a context that forks processes from one that has imported `tests.preload` and lives as
    long as this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        # DeepSpeed looks for GPUs at import, and forks can't use an initialized CUDA.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        forkserver.ensure_running()
    return context


_started: list[Command] = []


def end_all() -> None:
    """Kill processes left running by a failed test."""
    for command in _started:
        command.kill()
    _started.clear()


class Command:
    """Start a Python command, with an interface like `subprocess.Popen`.

    Args:
        arguments: Python's arguments: a file, `-m` and a module or `-c` and a program, and its
          arguments.
        env: the whole environment.
        constants: values that replace module constants (`module.NAME`), such as timeouts.
    """

    def __init__(
        self,
        arguments: Arguments,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        constants: Constants = None,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._stdout, self._stderr = files = [
            Path(self._folder.name) / name for name in ("stdout", "stderr")
        ]
        for file in files:
            file.touch()
        environment = dict(os.environ if env is None else env)
        taken_on = (self.args, environment, str(cwd), files, dict(constants or {}))
        self._process = warm_context().Process(target=_become, args=taken_on)
        self._process.start()
        _started.append(self)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Return its exit code, or the negative number of a fatal signal. Raises
        subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(
                self.args, timeout, self.stdout.encode(), self.stderr.encode()
            )
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None and self._process.pid:
            # The fork server may know its end before this process does.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        """Return its output so far."""
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()


def ranks(
    arguments: Arguments,
    world_size: int,
    *,
    env: Mapping[str, str],
    cwd: Path = ROOT,
    constants: Constants = None,
) -> list[Command]:
    """Start a command on every rank, like a launcher, but don't end the others when one ends."""
    size = str(world_size)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **address} for rank in range(world_size)]
    envs = [{**env, **place, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size} for place in places]
    return [Command(arguments, env=each, cwd=cwd, constants=constants) for each in envs]


def run(
    arguments: Arguments,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run`, and kill it after `TIMEOUT_S`."""
    command = Command(arguments, env=env, cwd=cwd)
    try:
        code = command.wait()
    finally:
        command.kill()
    done = subprocess.CompletedProcess(command.args, code, command.stdout, command.stderr)
    assert not check or code == 0, done.stdout + done.stderr
    return done


def _become(
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    outputs: list[Path],
    constants: dict[str, object],
) -> None:
    """Set up the forked process like a new one, and run the command."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate(outputs, start=1):
        with path.open("a") as file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # the platform's default, not this process's

    import torch

    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(sys.modules[module], constant), name
        setattr(sys.modules[module], constant, value)
    how, *rest = sys.argv = arguments
    sys.path[0] = cwd if how in ("-c", "-m") else str(Path(how).resolve().parent)
    if how == "-c":
        sys.argv = [how, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif how == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # already imported elsewhere
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(how, run_name="__main__")
