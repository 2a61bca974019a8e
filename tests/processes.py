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
        self._stdout = Path(self._folder.name) / "stdout"
        self._stderr = Path(self._folder.name) / "stderr"
        self._stdout.touch()
        self._stderr.touch()
        environment = dict(os.environ if env is None else env)
        outputs = [self._stdout, self._stderr]
        process_arguments = (self.args, environment, str(cwd), outputs, dict(constants or {}))
        self._process = warm_context().Process(target=_become, args=process_arguments)
        self._process.start()
        _started.append(self)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Return its exit code, or the negative number of a fatal signal. Raises
        subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            output = (self.stdout.encode(), self.stderr.encode())
            raise subprocess.TimeoutExpired(self.args, timeout, *output)
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
    port = free_port()
    commands = []
    for rank in range(world_size):
        variables = {**env, **launcher_variables(rank, world_size, port)}
        commands.append(Command(arguments, env=variables, cwd=cwd, constants=constants))
    return commands


def launcher_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that launchers set for a rank on a single host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


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
    program = arguments[0]
    if program == "-c":
        sys.path[0] = cwd
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif program == "-m":
        sys.path[0] = cwd
        sys.argv = arguments[1:]
        module_name = arguments[1]
        sys.modules.pop(module_name, None)  # already imported elsewhere
        runpy.run_module(module_name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        sys.argv = arguments
        runpy.run_path(program, run_name="__main__")
