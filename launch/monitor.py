"""Watches GPUs beside a job, and says afterwards what held them back.

    python launch/monitor.py watch RUN_DIRECTORY [--interval 15]     on each host, until it is ended
    python launch/monitor.py report RUN_DIRECTORY

Samples go to `monitor/<host>.jsonl` in the run directory: SM use, power, memory, temperature and PCIe traffic by NVML
(nvidia-ml-py), or CPU and memory where there is no GPU. Samples within the checkpoint intervals of `metrics.jsonl` are
left out of the report. Standard library besides NVML; no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERVAL_S = 15.0
Sample = dict[str, Any]
Sampler = Callable[[], list[Sample]]


def nvml_sampler(nvml: Any) -> Sampler:
    """Reads every GPU of this host through an initialised `pynvml` module."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def read(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except nvml.NVMLError:
            return None  # not every part measures everything

    def sample(index: int, handle: Any) -> Sample:
        memory = read(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = read(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = read(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
        received = read(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES))
        sent = read(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))
        return {
            "gpu": index,
            "sm_percent": use.gpu if use else None,
            "power_w": power / 1000 if power is not None else None,
            "power_limit_w": limit / 1000 if limit is not None else None,
            "memory_bytes": memory.used if memory else None,
            "memory_total_bytes": memory.total if memory else None,
            "temperature_c": read(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "pcie_rx_gb_per_s": received / 1e6 if received is not None else None,  # NVML counts in KB/s
            "pcie_tx_gb_per_s": sent / 1e6 if sent is not None else None,
        }

    return lambda: [sample(index, handle) for index, handle in enumerate(handles)]


def cpu_sampler(proc: Path = Path("/proc")) -> Sampler:
    """Reads this host's processors and memory: busy share since the last sample."""
    before = [0, 0]

    def read() -> list[Sample]:
        ticks = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, total = ticks[3] + ticks[4], sum(ticks)
        passed = total - before[1]
        busy = 100 * (1 - (idle - before[0]) / passed) if passed > 0 else 0.0
        before[:] = [idle, total]
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        memory = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        used = memory["MemTotal"] - memory["MemAvailable"]
        return [{"cpu_percent": busy, "memory_bytes": used, "memory_total_bytes": memory["MemTotal"]}]

    return read


def choose_sampler() -> Sampler:
    """NVML where there is a GPU it knows, the host's processors otherwise."""
    try:
        import pynvml

        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount() > 0:
            return nvml_sampler(pynvml)
    except Exception as error:
        # Neither a missing library nor a broken driver may hurt the job this runs beside.
        print(f"no GPU to watch ({type(error).__name__}); watching processors and memory", file=sys.stderr)
    return cpu_sampler()


def watch(run_directory: Path, interval_s: float, sampler: Sampler, stopped: Callable[[], bool]) -> int:
    """Append samples until told to stop; how many were written."""
    folder = run_directory / "monitor"
    folder.mkdir(exist_ok=True)
    written, due = 0, time.monotonic()
    sampler()  # the first busy share would be since the host's start
    with (folder / f"{os.uname().nodename}.jsonl").open("a", buffering=1) as file:
        while not stopped():
            due += interval_s
            while not stopped() and time.monotonic() < due:
                time.sleep(min(0.5, max(0.0, due - time.monotonic())))
            if stopped():
                break
            for sample in sampler():
                file.write(json.dumps({"time": time.time(), **sample}) + "\n")
                written += 1
    return written


@dataclass(frozen=True)
class Check:
    """One thing to flag: samples for which `bad` holds."""

    name: str
    fields: tuple[str, ...]
    bad: Callable[[Sample], bool]
    lasting: int = 1
    """Samples in a row, on one GPU, that it takes."""


CHECKS = (
    Check("SM use below 90 %", ("sm_percent",), lambda s: s["sm_percent"] < 90),
    # Half of what a 700 W part may draw; a part with a lower limit is not expected to draw it.
    Check(
        "power below 350 W", ("power_w", "power_limit_w"), lambda s: s["power_limit_w"] >= 650 and s["power_w"] < 350
    ),
    Check("temperature 85 °C or more", ("temperature_c",), lambda s: s["temperature_c"] >= 85),
    Check("PCIe receives more than 20 GB/s", ("pcie_rx_gb_per_s",), lambda s: s["pcie_rx_gb_per_s"] > 20, lasting=3),
)


def load_samples(run_directory: Path) -> dict[str, list[Sample]]:
    """Samples by `host` or `host:gpu`, in the order of time, without those taken during checkpoints.

    Raises:
        ValueError: the run directory has none.
    """
    intervals = checkpoint_intervals(run_directory)
    samples: dict[str, list[Sample]] = {}
    for path in sorted((run_directory / "monitor").glob("*.jsonl")):
        for sample in _json_lines(path):
            if not any(begin <= sample["time"] <= end for begin, end in intervals):
                samples.setdefault(f"{path.stem}:{sample['gpu']}" if "gpu" in sample else path.stem, []).append(sample)
    if not samples:
        raise ValueError(f"{run_directory}: no samples outside checkpoints under monitor/")
    return samples


def checkpoint_intervals(run_directory: Path) -> list[tuple[float, float]]:
    """Seconds since the epoch between which a checkpoint was written: lines of `metrics.jsonl` with `checkpoint:
    [begin, end]`."""
    path = run_directory / "metrics.jsonl"
    lines = _json_lines(path) if path.exists() else []
    return [
        (line["checkpoint"][0], line["checkpoint"][1]) for line in lines if isinstance(line.get("checkpoint"), list)
    ]


def _json_lines(path: Path) -> list[Sample]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the last line of a host that was killed
    return found


def flagged_share(samples: dict[str, list[Sample]], check: Check) -> tuple[float, str] | None:
    """Share of samples for which a check holds, and where it holds most; None where nothing measures it."""
    flagged: dict[str, tuple[int, int]] = {}
    for source, series in samples.items():
        measured = [s for s in series if all(s.get(name) is not None for name in check.fields)]
        if measured:
            flagged[source] = (_lasting([check.bad(s) for s in measured], check.lasting), len(measured))
    if not flagged:
        return None
    worst = max(flagged, key=lambda source: flagged[source][0] / flagged[source][1])
    return sum(bad for bad, _ in flagged.values()) / sum(total for _, total in flagged.values()), worst


def _lasting(flags: Iterable[bool], least: int) -> int:
    """Flags that stand in a row of at least `least`."""
    total, row = 0, 0
    for flag in [*flags, False]:
        if flag:
            row += 1
            continue
        total += row if row >= least else 0
        row = 0
    return total


def report(run_directory: Path) -> str:
    """What was flagged, as the share of samples outside the checkpoint intervals, and how much memory was never used."""
    samples = load_samples(run_directory)
    number = sum(map(len, samples.values()))
    lines = [f"{number} samples of {len(samples)} {'GPUs' if any(':' in name for name in samples) else 'hosts'}"]
    for check in CHECKS:
        found = flagged_share(samples, check)
        if found is None:
            lines.append(f"  {check.name}: not measured")
        else:
            lines.append(
                f"{'! ' if found[0] else '  '}{check.name}: {100 * found[0]:.0f} % of samples"
                + (f", most on {found[1]}" if found[0] else "")
            )
    used = {
        source: max(s["memory_bytes"] / s["memory_total_bytes"] for s in series if s.get("memory_bytes") is not None)
        for source, series in samples.items()
        if any(s.get("memory_bytes") is not None for s in series)
    }
    if used:
        fullest = max(used, key=lambda source: used[source])
        lines.append(f"  memory headroom: {100 * (1 - used[fullest]):.0f} % on {fullest}, the fullest")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/monitor.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["watch", "report"])
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between samples")
    arguments = parser.parse_args(argv)
    if not arguments.run_directory.is_dir() or arguments.interval <= 0:
        print(
            f"error: expected a run directory and a positive interval, found {arguments.run_directory}", file=sys.stderr
        )
        return 2
    if arguments.what == "report":
        try:
            print(report(arguments.run_directory))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: told.append(number))
    watch(arguments.run_directory, arguments.interval, choose_sampler(), lambda: bool(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
