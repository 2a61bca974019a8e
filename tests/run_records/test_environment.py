"""Memory as the kernel counts it, and the recorded environment."""

import json
import sys
from pathlib import Path

import pytest
import torch

from clap_ds.run_records.environment import environment, peak_memory_bytes

CPU = torch.device("cpu")


def test_what_a_run_ran_on_can_be_written_down() -> None:
    found = environment(CPU, "avx512")
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert (found["cpu_kernels"], found["cuda"], found["driver"]) == ("avx512", torch.version.cuda, None)
    assert found["device_name"] in Path("/proc/cpuinfo").read_text()
    assert found["command"] == [sys.executable, *sys.argv]
    highest_kib = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    assert peak_memory_bytes(CPU) == pytest.approx(1024 * highest_kib, rel=0.01)
