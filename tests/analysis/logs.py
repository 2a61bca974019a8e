"""Logs as DeepSpeed prints them, for tests to damage."""

from pathlib import Path


def throughput_line(step: int, average: float, current: float = 1.0) -> str:
    return (
        f"[2026-11-20 17:47:15,917] [INFO] [timer.py:264:stop] epoch=0/micro_step={step}/global_step={step}, "
        f"RunningAvgSamplesPerSec={average}, CurrSamplesPerSec={current}, MemAllocated=0.35GB, MaxMemAllocated=1.5GB\n"
    )


def running_log(step_times: list[float], batch: int = 64, every: int = 1) -> str:
    """What DeepSpeed prints for steps that take these times; the first two are not timed."""
    lines, elapsed = [], 0.0
    for step, time in enumerate(step_times, start=1):
        if step > 2:
            elapsed += time
            if step % every == 0:
                lines.append(throughput_line(step, batch / (elapsed / (step - 2)), batch / time))
    return "".join(lines)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path
