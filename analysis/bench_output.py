"""What the benchmark prints on its terminal, in `rank0.log` and so in SLURM's files → what its summary holds.

Its figures are the timed windows' and count the wait for data. DeepSpeed's lines between them are of the warm-up and of the
instrumented pass as well, so where there are windows or a table of the benchmark's, its own figures are taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from clap_ds.analysis.log_lines import model_before
from clap_ds.record.schema import STEP_PHASES, VERSION

FEWEST_SAMPLES_PER_S = 50.0
"""Rates of windows are printed with one decimal: below this that is too coarse beside the table's."""


@dataclass
class BenchOutput:
    """What one run of the benchmark printed."""

    windows: list[float] = field(default_factory=list)
    """Samples/s of all ranks."""
    figures: dict[str, str] = field(default_factory=dict)
    """Its final table."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the title over it, as in a summary."""

    @property
    def has_table(self) -> bool:
        """Whether the final table was printed; others in the same log (of an evaluation) have no rate."""
        return any(name.startswith("samples/s/") for name in self.figures)

    def add(self, kind: str, match: re.Match[bytes]) -> None:
        """Take in a line of a kind that begins with `bench_`."""
        if kind == "bench_window":
            self.windows += _numbers(match[2].decode())
        elif kind == "bench_figure":
            self.figures[match[1].decode(errors="replace")] = match[2].decode(errors="replace")
        else:
            ranks, device, nodes, precision, micro_batch, tokens = (
                text.decode(errors="replace") for text in match.groups()
            )
            self.facts = {
                "preset": model_before(match), "world_size": int(ranks), "device_name": device, "num_nodes": int(nodes),
                "precision": precision, "micro_batch_per_gpu": int(micro_batch), "text_tokens": int(tokens),
            }  # fmt: skip

    def begins_anew(self, kind: str, match: re.Match[bytes]) -> bool:
        """Whether a line can only be another run's."""
        if kind == "bench_window":
            return self.has_table or int(match[1]) <= len(self.windows)
        return kind == "bench_title" and bool(self.facts)

    def summary(self, gpus: int, accumulation: int | None) -> dict[str, Any]:
        """The fields of a summary that follow, for this many ranks where the title is missing."""
        unit = "GPU" if "samples/s/GPU" in self.figures else "rank"
        rate = self._numbers(f"samples/s/{unit}")[0]
        total = self._numbers("samples/s in all")[0]
        gpus = self.facts.get("world_size") or gpus or (round(total / rate) if total and rate else 0)
        label = next((name for name in self.figures if re.search(r"(% interval|range) of", name)), "")
        low, high = self._numbers(label, 2)
        engine = self._name("samples/s in all, by DeepSpeed")
        is_mean = label.startswith(("95 % interval", "range"))  # what is printed since rates are samples over time
        step_s, slowest_s = (self._seconds(f"step time, {name}") for name in ("median", "slowest rank"))
        mfu, peak = self._numbers("MFU, work really done", 2)
        memory = self._numbers(self._name("peak memory"))[0]
        parts = {phase: self._seconds(phase.replace("_", " ")) for phase in STEP_PHASES}
        micro_batch = self.facts.get("micro_batch_per_gpu")
        if rate and step_s and micro_batch:
            accumulation = accumulation or max(1, round(rate * step_s / micro_batch))
        exact = rate is None or min(self.windows, default=0) >= FEWEST_SAMPLES_PER_S
        windows = [window / (gpus or 1) for window in self.windows] if exact else []
        return {
            **({"world_size": gpus} if gpus else {}), **self.facts, "schema": VERSION if is_mean or not rate else None,
            "samples_per_s_per_gpu": {"mean": rate, "low": low, "high": high, "windows": windows, "label": label},
            "deepspeed_samples_per_s": self._numbers(engine)[0], "deepspeed_times_host_alone": "(the" in engine,
            "achieved_tflops": self._numbers(self._name("TFLOPS achieved per"))[0],
            "step_time_s": {"median": step_s, "slowest_rank_median": slowest_s}, "gradient_accumulation_steps": accumulation,
            "data_wait_percent": self._numbers("waiting for data")[0], "memory_peak_bytes": memory and memory * 2**30,
            "breakdown_s": parts,
            "mfu_model_percent": mfu, "peak_tflops": peak,
        }  # fmt: skip

    def _numbers(self, name: str, count: int = 1) -> list[float | None]:
        """The first numbers of a line of the table, None for those that there aren't."""
        return [*_numbers(self.figures.get(name, "")), *[None] * count][:count]

    def _name(self, begins: str) -> str:
        return next((name for name in self.figures if name.startswith(begins)), "")

    def _seconds(self, name: str) -> float | None:
        (milliseconds,) = self._numbers(name)
        return None if milliseconds is None else milliseconds / 1000


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
