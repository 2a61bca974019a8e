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
    describe_environment,
    memory_limits,
    peak_memory,
    peak_memory_bytes,
    read_energy_joules,
    read_infiniband_rates,
    summarize_energy,
    summarize_memory,
)

CPU = torch.device("cpu")


def test_environment_describes_device_software_and_command():
    content = describe_environment(CPU)
    assert json.loads(json.dumps(content)) == content
    assert content["versions"]["torch"] == torch.__version__
    assert content["device_name"] in Path("/proc/cpuinfo").read_text()
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert content["host_memory_bytes"] == 1024 * total_kib


def test_infiniband_ports_that_are_up_have_rates(tmp_path):
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert read_infiniband_rates(tmp_path) == {"mlx5_0/1": "400 Gb/sec (4X NDR)"}


def test_largest_memory_of_gpus_includes_memory_outside_torch(monkeypatch):
    sizes = {
        "max_memory_allocated": 5,
        "memory_reserved": 6,
        "max_memory_reserved": 8,
        # free, total
        "mem_get_info": (3, 10),
    }
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    ranks = [peak_memory(torch.device("cuda")), [7, 7, 0]]
    assert summarize_memory(ranks) == {
        "memory_peak_bytes": 7,
        "memory_reserved_peak_bytes": 8,
        "memory_context_bytes": 1,
    }


def test_energy_is_by_nvmls_counter(monkeypatch):
    millijoules = {"handle of 1": 7_200_000}
    nvml = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=millijoules.__getitem__)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    find_handle = lambda device: f"handle of {device.index}"  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", find_handle)
    assert read_energy_joules(torch.device("cuda", 1)) == 7200
    # a GPU without a counter
    assert math.isnan(read_energy_joules(torch.device("cuda", 2)))


def test_energy_fields_are_absent_if_unknown():
    assert summarize_energy(7200.0, 100) == {"energy_kwh": 0.002, "joules_per_sample": 72.0}
    assert summarize_energy(math.nan, 100) == {}


@pytest.mark.parametrize(
    ("controllers", "files"),
    [
        ("", ("memory.max", "memory.current", "")),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")),
    ],
)
def test_cgroup_limits_include_ancestors_and_exclude_file_caches(tmp_path, controllers, files):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    line = f"9:name=systemd:/\n0:{controllers}:/job_1/step_0\n"
    (tmp_path / "proc" / "self" / "cgroup").write_text(line)
    limit_file, usage_file, cache = files
    for name, limit, use in (("job_1", "1000", "700"), ("job_1/step_0", "max", "300")):
        group = tmp_path / "sys" / "fs" / "cgroup" / controllers / name
        group.mkdir(parents=True)
        (group / limit_file).write_text(f"{limit}\n")
        (group / usage_file).write_text(f"{use}\n")
        (group / "memory.stat").write_text(f"{cache}inactive_file 60\n{cache}active_file 40\n")
    assert [*cgroup_limits(tmp_path)] == [MemoryLimit("memory limit of cgroup /job_1", 400)]


def test_peak_memory_on_cpu_is_the_kernels():
    status = Path("/proc/self/status").read_text()
    highest_kib = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_memory_bytes(CPU) == pytest.approx(1024 * highest_kib, rel=0.01)


def test_address_space_limit_is_of_this_process(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**15, 10**15))
    limit = memory_limits(CPU)[-1]
    assert "ulimit -v" in limit.name
    assert 10**15 - limit.free == pytest.approx(psutil.Process().memory_info().vms, rel=0.1)
