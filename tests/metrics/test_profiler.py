"""Profiles of steps on the CPU, and the calls on a GPU, with stand-ins."""

import gzip
import re
from pathlib import Path
from typing import Any

import torch

from clap_ds.config.schema import ProfileSettings
from clap_ds.metrics.profiler import StepProfiler
from clap_ds.metrics.timers import StepTimer


def run_steps(folder: Path, num_steps: int, device: str = "cpu", **settings: Any) -> bytes:
    """Take steps of one matrix product on rank 0, and return its trace, if any."""
    timer = StepTimer(torch.device(device))
    profile = ProfileSettings(**settings)
    steps = profile.steps_from(profile.start_step)
    with StepProfiler(profile, timer, folder, 0, steps) as profiler:
        for step in range(1, num_steps + 1):
            profiler.begin_step(step)
            with timer("forward"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            profiler.end_step(step)
    path = folder / "profile/rank0_trace.json.gz"
    return gzip.decompress(path.read_bytes()) if path.exists() else b""


def test_trace_has_the_chosen_steps_and_phases_and_the_table_the_product(tmp_path, capsys):
    trace = run_steps(tmp_path, 9, start_step=3, steps=4, memory=True)
    names = (b'"ProfilerStep#', b'"forward"', b'"aten::mm"')
    assert [trace.count(name) for name in names] == [4, 4, 4]
    table = (tmp_path / "profile/rank0_table.txt").read_text()
    assert b'"[memory]"' in trace
    output, warning = capsys.readouterr()
    assert "a CPU has no memory snapshot" in warning
    assert "profile of steps 3 to 6 on rank 0" in output
    for text in (table, output):
        (product,) = re.findall(r"aten::mm .*", text)
        assert product.split()[-1] == "4"


def test_run_that_ends_within_the_profiled_steps_leaves_those_it_took(tmp_path, capsys):
    assert run_steps(tmp_path, 4, start_step=3, steps=4).count(b'"forward"') == 2
    assert "ended before step 6" in capsys.readouterr().out


def test_nsight_gets_ranges_and_the_cuda_allocator_writes_its_snapshot(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    for name in (
        "synchronize", "profiler.start", "profiler.stop", "nvtx.range_push", "nvtx.range_pop",
        "memory._record_memory_history", "memory._dump_snapshot",
    ):  # fmt: skip

        def record(*arguments: Any, name: str = name, **options: Any) -> None:
            calls.append((name, *arguments, *options.values()))

        monkeypatch.setattr(f"torch.cuda.{name}", record)
    assert not run_steps(tmp_path, 4, "cuda", start_step=2, steps=1, memory=True)
    assert [call for call in calls if call[0] != "synchronize"] == [
        ("memory._record_memory_history", 200_000),
        ("profiler.start",),
        *[("nvtx.range_push", "forward"), ("nvtx.range_pop",)] * 2,
        ("profiler.stop",),
        ("memory._dump_snapshot", str(tmp_path / "profile/rank0_memory.pickle")),
        ("memory._record_memory_history", None),
    ]
