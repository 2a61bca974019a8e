"""Memory as the kernel counts it, and the recorded environment."""

import json
import math
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from clap_ds.run_records.environment import (
    MemoryLimit,
    cgroup_limits,
    energy,
    energy_joules,
    environment,
    infiniband_rates,
    largest_memory,
    memory_limits,
    peak_memory,
    peak_memory_bytes,
)

CPU = torch.device("cpu")


def test_what_a_run_ran_on_can_be_written_down() -> None:
    found = environment(CPU, "avx512")
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert (found["cpu_kernels"], found["cuda"], found["driver"]) == (
        "avx512",
        torch.version.cuda,
        None,
    )
    assert found["device_name"] in Path("/proc/cpuinfo").read_text()
    assert found["command"] == [sys.executable, *sys.argv]
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert found["host_memory_bytes"] == 1024 * kib


def test_ports_of_infiniband_that_are_up_have_rates(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (port := tmp_path / device / "ports" / "1").mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert infiniband_rates(tmp_path) == {"mlx5_0/1": "400 Gb/sec (4X NDR)"}
    assert infiniband_rates(tmp_path / "gone") == {}
    highest_kib = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    assert peak_memory_bytes(CPU) == pytest.approx(1024 * highest_kib, rel=0.01)


def test_memory_of_a_gpu_includes_what_torch_does_not_allocate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {
        "max_memory_allocated": 5,
        "memory_reserved": 6,
        "max_memory_reserved": 8,
        "mem_get_info": (3, 10),
    }
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    ranks = [peak_memory(torch.device("cuda")), [7, 7, 0]]
    names = ("memory_peak_bytes", "memory_reserved_peak_bytes", "memory_context_bytes")
    assert largest_memory(ranks) == dict(zip(names, (7, 8, 1), strict=True))


def test_energy_is_by_nvmls_counter_and_absent_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption={"handle of 1": 7_200_000}.__getitem__
    )
    monkeypatch.setitem(sys.modules, "pynvml", counters)
    monkeypatch.setattr(
        torch.cuda, "_get_pynvml_handler", lambda device: f"handle of {device.index}"
    )
    assert energy_joules(torch.device("cuda", 1)) == 7200
    assert energy(7200.0, 100) == {"energy_kwh": 0.002, "joules_per_sample": 72.0}
    assert math.isnan(energy_joules(torch.device("cuda", 2)))  # without a counter
    assert energy(energy_joules(CPU), 100) == {}


@pytest.mark.parametrize(
    ("line", "folder", "files", "cache"),
    [
        ("0::/job_1/step_0", "", ("memory.max", "memory.current"), ""),
        (
            "4:memory:/job_1/step_0",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_",
        ),
    ],
)
def test_limits_of_a_cgroup_and_its_ancestors_count_without_file_caches(
    tmp_path: Path, line: str, folder: str, files: tuple[str, str], cache: str
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    for name, limit, use in (("job_1", "1000", "700"), ("job_1/step_0", "max", "300")):
        group = tmp_path / "sys" / "fs" / "cgroup" / folder / name
        group.mkdir(parents=True)
        (group / files[0]).write_text(f"{limit}\n")
        (group / files[1]).write_text(f"{use}\n")
        (group / "memory.stat").write_text(
            f"anon 9\n{cache}inactive_file 60\n{cache}active_file 40\n"
        )
    assert [*cgroup_limits(tmp_path)] == [MemoryLimit("memory limit of cgroup /job_1", 400)]


def test_the_address_space_is_this_processs_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        0 < memory_limits(CPU)[0].free < psutil.virtual_memory().total + psutil.swap_memory().total
    )
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**15, 10**15))
    limit = memory_limits(CPU)[-1]
    assert "ulimit -v" in limit.name
    assert 10**15 - limit.free == pytest.approx(psutil.Process().memory_info().vms, rel=0.1)
