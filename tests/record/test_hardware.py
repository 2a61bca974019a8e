"""Memory as the kernel counts it, and what a run says that it ran on."""

import json
import sys
from pathlib import Path

import pytest
import torch

from clap_ds.record.hardware import environment, largest_memory, peak_memory, peak_memory_bytes

CPU = torch.device("cpu")


def test_peak_is_in_bytes_and_of_the_rank_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "VmPeak:\t 9437184 kB\nVmHWM:\t 3145728 kB\nVmRSS:\t 1024 kB\n")
    assert peak_memory_bytes(CPU) == 3 * 2**30
    assert largest_memory([peak_memory(CPU), [2**30]]) == {"memory_peak_bytes": 3 * 2**30}
    of_gpus = {"memory_peak_bytes": 5, "memory_reserved_peak_bytes": 9}
    assert largest_memory([[5, 7], [4, 9]]) == of_gpus


def test_what_a_run_ran_on_can_be_written_down() -> None:
    found = environment(CPU, "avx512")
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert (found["cpu_kernels"], found["cuda"], found["driver"]) == ("avx512", torch.version.cuda, None)
    assert found["device_name"] in Path("/proc/cpuinfo").read_text()
    assert found["command"] == [sys.executable, *sys.argv]
