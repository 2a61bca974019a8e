"""Memory as the kernel counts it."""

import sys
from pathlib import Path

import pytest
import torch

from clap_ds.record.hardware import largest_memory, peak_memory, peak_memory_bytes
from tests.processes import ROOT, run

CPU = torch.device("cpu")
AFTER_EXEC = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")  # not needed on a CPU, and large
from clap_ds.record.hardware import peak_memory_bytes
print(peak_memory_bytes(types.SimpleNamespace(type="cpu")))
"""


def test_memory_of_before_an_exec_does_not_count() -> None:
    """As of a launcher that loaded much before it became the rank."""
    held = f"import os; held = b'x' * 2**29; os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {AFTER_EXEC!r}])"
    assert 2**23 < int(run(["-c", held], cwd=ROOT, check=True).stdout) < 2**28


def test_peak_is_in_bytes_and_of_the_rank_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "VmPeak:\t 9437184 kB\nVmHWM:\t 3145728 kB\nVmRSS:\t 1024 kB\n")
    assert peak_memory_bytes(CPU) == 3 * 2**30
    assert largest_memory([peak_memory(CPU), [2**30]]) == {"memory_peak_bytes": 3 * 2**30}
    of_gpus = {"memory_peak_bytes": 5, "memory_reserved_peak_bytes": 9}
    assert largest_memory([[5, 7], [4, 9]]) == of_gpus
