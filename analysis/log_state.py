"""What `clap_ds.analysis.deepspeed_log` keeps while it reads: bounded however long the log is."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_WINDOWS = 128
TIMER_START_STEP = 2
"""DeepSpeed's ThroughputTimer doesn't time the first two steps."""
_LAUNCH_FIELDS = ("num_nodes", "world_size", "micro_batch", "accumulation", "global_batch", "precision")


@dataclass
class WindowSeries:
    """Rates of consecutive stretches of steps in constant memory: when full, neighbours merge."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Timer seconds divided by the global batch."""
    size: int = 1
    """Printed intervals that one window holds."""
    open_count: int = 0
    open_steps: int = 0
    open_time: float = 0.0

    def add(self, steps: int, time: float) -> None:
        self.open_steps += steps
        self.open_time += time
        self.open_count += 1
        if self.open_count < self.size:
            return
        self.steps.append(self.open_steps)
        self.times.append(self.open_time)
        self.open_count, self.open_steps, self.open_time = 0, 0, 0.0
        if len(self.steps) == MAX_WINDOWS:
            self.steps = [a + b for a, b in zip(self.steps[::2], self.steps[1::2], strict=True)]
            self.times = [a + b for a, b in zip(self.times[::2], self.times[1::2], strict=True)]
            self.size *= 2

    def rates(self) -> list[float]:
        """Global samples/s of each full window."""
        return [steps / time for steps, time in zip(self.steps, self.times, strict=True)]


@dataclass
class Attempt:
    """One start of the training program; a restart begins the next."""

    num_nodes: int | None = None
    world_size: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    state: str = "unknown"
    windows: WindowSeries = field(default_factory=WindowSeries)
    last_step: int = 0
    last_average: float = 0.0
    """The latest running average, over all timed steps: what a log too short for windows still says."""
    interval: int = 0
    max_memory_gib: float = 0.0
    breakdown_ms: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Sums of forward, backward, all-reduce, optimiser."""
    breakdown_steps: int = 0

    def restarted(self) -> Attempt:
        """A new attempt, of the same shape until its own lines say otherwise."""
        return Attempt(**{name: getattr(self, name) for name in _LAUNCH_FIELDS})


@dataclass
class LogScan:
    """What a log holds: attempts in order, and what could not be used."""

    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])
    unusable: int = 0
    """Throughput lines with a zero, negative, infinite or undecodable rate."""
    repeated: int = 0
    """Throughput lines of a step already seen (another rank's, or out of order)."""
    damaged: int = 0
    """Throughput lines cut or overwritten by another rank's."""
    truncated_gzip: bool = False
    binary: bool = False
    num_bytes: int = 0
