"""Watches GPUs beside a job, and says afterwards what held them back.

    python launch/monitor.py watch RUN_DIRECTORY [--interval 15]     on each host, until it is ended
    python launch/monitor.py report RUN_DIRECTORY

Samples go to `monitor/<host>.jsonl` in the run directory: SM use, power, memory, temperature and PCIe traffic by NVML
(nvidia-ml-py), or CPU and memory (psutil) where there is no GPU. The report leaves out samples taken during checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clap_ds.config.errors import UserError, exit_code_of

Sample = dict[str, Any]
Sampler = Callable[[], list[Sample]]


def nvml_sampler(nvml: Any) -> Sampler:
    """Reads every GPU of this host through an initialised `pynvml` module."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def read(handle: Any, name: str, *arguments: Any, field: str = "", unit: float = 1) -> Any:
        try:
            value = getattr(nvml, f"nvmlDeviceGet{name}")(handle, *arguments)
        except nvml.NVMLError:
            return None  # not every part measures everything
        value = getattr(value, field) if field else value
        return value if unit == 1 else value / unit

    def sample(index: int, handle: Any) -> Sample:
        return {
            "gpu": index,
            "sm_percent": read(handle, "UtilizationRates", field="gpu"),
            "power_w": read(handle, "PowerUsage", unit=1e3),
            "power_limit_w": read(handle, "PowerManagementLimit", unit=1e3),
            "memory_bytes": read(handle, "MemoryInfo", field="used"),
            "memory_total_bytes": read(handle, "MemoryInfo", field="total"),
            "temperature_c": read(handle, "Temperature", nvml.NVML_TEMPERATURE_GPU),
            # NVML counts in KB/s.
            "pcie_rx_gb_per_s": read(handle, "PcieThroughput", nvml.NVML_PCIE_UTIL_RX_BYTES, unit=1e6),
            "pcie_tx_gb_per_s": read(handle, "PcieThroughput", nvml.NVML_PCIE_UTIL_TX_BYTES, unit=1e6),
        }

    return lambda: [sample(index, handle) for index, handle in enumerate(handles)]


def cpu_sample() -> list[Sample]:
    """This host's memory, and the busy share of its processors since the last sample."""
    import psutil

    memory = psutil.virtual_memory()
    used = {"memory_bytes": memory.total - memory.available, "memory_total_bytes": memory.total}
    return [{"cpu_percent": psutil.cpu_percent(), **used}]


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
    return cpu_sample


def watch(run_directory: Path, interval_s: float, sampler: Sampler) -> None:
    """Append samples, until a KeyboardInterrupt."""
    folder = run_directory / "monitor"
    folder.mkdir(exist_ok=True)
    sampler()  # the first busy share would be since the host's start
    due = time.monotonic()
    with (folder / f"{os.uname().nodename}.jsonl").open("a", buffering=1) as file:
        while True:
            due += interval_s
            time.sleep(max(0.0, due - time.monotonic()))
            for sample in sampler():
                file.write(json.dumps({"time": time.time(), **sample}) + "\n")


class Check(NamedTuple):
    """One thing to flag: samples for which `bad` holds, `lasting` of them in a row on one GPU."""

    name: str
    fields: tuple[str, ...]
    bad: Callable[[Sample], bool]
    lasting: int = 1


CHECKS = (
    Check("SM use below 90 %", ("sm_percent",), lambda s: s["sm_percent"] < 90),
    # Half of what a 700 W part may draw; a part with a lower limit is not expected to draw it.
    Check(
        "power below 350 W", ("power_w", "power_limit_w"), lambda s: s["power_w"] < 350 and s["power_limit_w"] >= 650
    ),
    Check("temperature 85 °C or more", ("temperature_c",), lambda s: s["temperature_c"] >= 85),
    Check("PCIe receives more than 20 GB/s", ("pcie_rx_gb_per_s",), lambda s: s["pcie_rx_gb_per_s"] > 20, lasting=3),
)


def load_samples(run_directory: Path) -> dict[str, list[Sample]]:
    """Samples by `host` or `host:gpu`, in the order of time, but those taken during checkpoints; a UserError without any."""
    # Lines with `checkpoint: [begin, end]`, in seconds since the epoch.
    steps = _json_lines(run_directory / "metrics.jsonl")
    checkpoints = [line["checkpoint"] for line in steps if isinstance(line.get("checkpoint"), list)]
    samples: dict[str, list[Sample]] = {}
    for path in sorted((run_directory / "monitor").glob("*.jsonl")):
        for sample in _json_lines(path):
            if not any(begin <= sample["time"] <= end for begin, end in checkpoints):
                samples.setdefault(f"{path.stem}:{sample['gpu']}" if "gpu" in sample else path.stem, []).append(sample)
    if not samples:
        raise UserError(f"{run_directory}: no samples outside checkpoints under monitor/")
    return samples


def _json_lines(path: Path) -> Iterator[Sample]:
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a host that was killed
            yield json.loads(line)


def flagged_share(samples: dict[str, list[Sample]], check: Check) -> tuple[float, str] | None:
    """Share of samples for which a check holds, and where it holds most; None where nothing measures it."""
    flagged: dict[str, tuple[int, int]] = {}
    for source, series in samples.items():
        measured = [s for s in series if all(s.get(name) is not None for name in check.fields)]
        rows = [len([*row]) for bad, row in itertools.groupby(measured, check.bad) if bad]
        if measured:
            flagged[source] = (sum(row for row in rows if row >= check.lasting), len(measured))
    if not flagged:
        return None
    worst = max(flagged, key=lambda source: flagged[source][0] / flagged[source][1])
    return sum(bad for bad, _ in flagged.values()) / sum(total for _, total in flagged.values()), worst


def report(run_directory: Path) -> str:
    """What was flagged, as the share of samples outside the checkpoint intervals, and how much memory was never used."""
    samples = load_samples(run_directory)
    number = sum(map(len, samples.values()))
    lines = [f"{number} samples of {len(samples)} {'GPUs' if any(':' in name for name in samples) else 'hosts'}"]
    for check in CHECKS:
        share, worst = flagged_share(samples, check) or (None, "")
        text = "not measured" if share is None else f"{100 * share:.0f} % of samples"
        lines.append(f"{'! ' if share else '  '}{check.name}: {text}{f', most on {worst}' if share else ''}")
    pairs = ((source, sample) for source, series in samples.items() for sample in series)
    used = [(s["memory_bytes"] / s["memory_total_bytes"], source) for source, s in pairs if s.get("memory_bytes")]
    if used:
        fullest, where = max(used)
        lines.append(f"  memory headroom: {100 * (1 - fullest):.0f} % on {where}, the fullest")
    return "\n".join(lines)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/monitor.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["watch", "report"])
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between samples")
    parser.add_argument("--while_open", action="store_true", help="end with standard input: with who started it")
    arguments = parser.parse_args(argv)
    if not arguments.run_directory.is_dir() or arguments.interval <= 0:
        parser.error(f"expected a run directory and a positive interval, found {arguments.run_directory}")
    if arguments.what == "report":
        return exit_code_of(lambda: print(report(arguments.run_directory)))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    if arguments.while_open:
        threading.Thread(target=_end_with_input, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        watch(arguments.run_directory, arguments.interval, choose_sampler())
    return 0


if __name__ == "__main__":
    sys.exit(main())
