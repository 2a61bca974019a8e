"""Scaling tables by hand: repeats, weak and strong scaling, grouping into series, failures,
gaps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import scaling
from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.scaling import render, scaling_table
from clap_ds.analysis.table import Row, Run, read_table_runs, write_csv
from tests.analysis.samples import command, given, record, run, running_log, write

PARTS = {"forward_s": 0.4, "backward_s": 0.8, "exposed_communication_s": 0.6, "optimizer_s": 0.2}


def test_failed_and_partial_runs_are_in_the_table_and_count_only_where_nothing_completed() -> None:
    failed = run(2, None, state="out_of_memory", error="CUDA out of memory;\n tried 2 GiB")
    partial = run(1, 50.0, state="timeout")
    base, row = scaling_table([run(1, 100.0), partial, failed])
    assert (base.rate, base.repeats, base.state) == (100.0, 1, "1 completed, 1 timeout")
    assert (row.state, row.rate, row.scaling_efficiency_percent, row.repeats) == (
        "out_of_memory",
        None,
        None,
        0,
    )
    assert row.notes == "out_of_memory: CUDA out of memory, tried 2 GiB"
    (row,) = scaling_table([partial])
    assert (row.rate, row.state) == (50.0, "timeout")


def test_weak_and_strong_scaling_are_told_apart_also_of_a_table_that_was_written(
    tmp_path: Path,
) -> None:
    weak = [
        run(nodes, rate, batch_per_gpu=64) for nodes, rate in ((1, 100.0), (2, 95.0), (4, 90.0))
    ]
    strong = [
        run(nodes, rate, batch_per_gpu=64 // nodes)
        for nodes, rate in ((1, 100.0), (2, 80.0), (4, 60.0))
    ]
    of_weak = [("weak", 4, 100.0, 1.0), ("weak", 8, 95.0, 1.9), ("weak", 16, 90.0, 3.6)]
    of_strong = [("strong", 4, 100.0, 1.0), ("strong", 8, 80.0, 1.6), ("strong", 16, 60.0, 2.4)]
    for runs, found in ((weak, of_weak), (strong, of_strong)):
        written = scaling_table(runs)
        write_csv(tmp_path / "t.csv", written)
        for rows in (written, scaling_table(read_table_runs(tmp_path / "t.csv"))):
            shown = [
                (row.scaling, row.gpus, row.scaling_efficiency_percent, row.speedup) for row in rows
            ]
            assert shown == [(*told, pytest.approx(speedup)) for *told, speedup in found]
    mixed = scaling_table([*weak, run(1, 50.0, batch_per_gpu=32)])
    names = [("batch per GPU 64", "weak")] * 3 + [("batch per GPU 32", "weak")]
    assert [(row.variant, row.scaling) for row in mixed] == names
    unknown = scaling_table([run(nodes, 100.0, batch_per_gpu=None) for nodes in (1, 2)])
    assert [row.scaling for row in unknown] == ["", ""]


def test_baseline_is_the_smallest_scale_with_a_rate() -> None:
    def percents(runs: list[Run]) -> list[float | None]:
        return [row.scaling_efficiency_percent for row in scaling_table(runs)]

    runs = [run(1, 110.0, gpus=1), run(1, 100.0, gpus=4), run(2, 90.0), run(4, 72.0)]
    rates = [row.speedup for row in scaling_table(runs)]
    assert rates == pytest.approx(
        [1.0, 4 * 100 / 110, 8 * 90 / 110, 16 * 72 / 110]
    )  # by GPUs, whatever their nodes
    assert percents(runs) == pytest.approx([100, 100 / 1.1, 90 / 1.1, 72 / 1.1])
    assert percents([run(1, None, state="failed"), *runs[2:]]) == [None, 100.0, pytest.approx(80.0)]


def test_mfu_needs_a_peak_and_exposed_communication_is_its_share_of_the_parts() -> None:
    (row,) = scaling_table(
        [run(1, 623.7, peak_tflops=989.0, **PARTS), run(1, 623.7, memory_peak_gib=3.0, **PARTS)]
    )
    assert (row.mfu_published_percent, row.memory_peak_gib) == (
        pytest.approx(21.04, abs=0.005),
        3.0,
    )
    assert row.exposed_communication_percent == pytest.approx(30.0)
    assert scaling_table([run(1, 623.7)])[0].mfu_published_percent is None


def test_efficiency_above_all_is_doubted() -> None:
    stated = {"kind": "table", "repeats": 2, "samples_per_s_per_gpu_ci95": 10.0}
    for fields, rate, doubted in (({}, 103.0, True), ({}, 101.0, False), (stated, 103.0, False)):
        rows = scaling_table([run(n, r, **fields) for n, r in ((1, 100.0), (2, rate), (4, 90.0))])
        assert [("above 100%" in row.notes) for row in rows] == [False, doubted, False]
        assert rows[1].scaling_efficiency_percent == pytest.approx(rate)


def configured(
    nodes: int, rate: float = 90.0, environment: Any = None, batch: int = 8, **settings: Any
) -> Run:
    """Return a run with these settings (double underscores for dots) and others that must not
    matter."""
    config: dict[str, Any] = {
        "clap": {"seed": rate, "output": {"label": f"{nodes}"}, "checkpoint": {"folder": f"{rate}"}}
    }
    for name, value in settings.items():
        *sections, last = name.split("__")
        section = config
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    return run(nodes, rate, config=config, environment=environment or {}, batch_per_gpu=batch)


def test_runs_of_other_settings_are_series_of_their_own_also_after_writing(tmp_path: Path) -> None:
    synced = ((90.0, "deepspeed"), (91.0, "deepspeed"), (99.0, "overlap"))
    sweep = [
        configured(nodes, rate, clap__gradient_sync=sync)
        for nodes in (1, 2)
        for rate, sync in synced
    ]
    found = [(row.variant, row.gpus, row.repeats) for row in scaling_table(sweep)]
    names = [("gradient_sync=deepspeed", 2), ("gradient_sync=overlap", 1)]
    assert found == [(name, gpus, repeats) for name, repeats in names for gpus in (4, 8)]
    batches = [configured(nodes, batch=size) for size in (8, 64) for nodes in (1, 2)]
    for runs, rates in ((sweep, [90.5, 90.5, 99.0, 99.0]), (batches, [90.0] * 4)):
        rows = scaling_table(runs)
        assert [row.rate for row in rows] == rates
        assert all(f"### {rows[number].title}" in render(rows) for number in (0, 2))
        write_csv(tmp_path / "t.csv", rows)
        again = scaling_table(read_table_runs(tmp_path / "t.csv"))
        assert [row.series for row in again] == [row.series for row in rows]
    assert [row.variant for row in rows] == ["batch per GPU 8"] * 2 + ["batch per GPU 64"] * 2


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"zero_optimization__stage": 0}, {"zero_optimization__stage": 1},
         ["zero_optimization.stage=0", "zero_optimization.stage=1"]),
        ({"clap__data__shards": "/a/x"}, {"clap__data__shards": "/b/x"}, []),
        ({"environment": {"git_commit": "a" * 40}}, {"environment": {"git_commit": "b" * 40 + "+"}},
         ["commit=aaaaaaaaaaaa", "commit=bbbbbbbbbbbb+"]),
        ({"environment": {"hosts": ["n1"]}}, {"environment": {"hosts": ["n2"]}}, []),
        ({"clap__bench__windows": 8, "clap__bench__breakdown_steps": 5},
         {"clap__bench__windows": 9, "clap__bench__breakdown_steps": 0}, []),
        # As few differences as possible name them.
        ({"a": 1, "clap__bench__warmup_steps": 8, "b": 1}, {"a": 2, "clap__bench__warmup_steps": 9, "b": 2}, ["a=1", "a=2"]),
    ],
)  # fmt: skip
def test_what_makes_runs_differ(first: Any, second: Any, names: list[str]) -> None:
    """Series differ in configuration, code and hardware, not in seeds, labels, paths and hosts, at
    all scales."""
    for nodes in (1, 2):
        rows = scaling_table([configured(1, 90.0, **first), configured(nodes, 91.0, **second)])
        assert {row.variant for row in rows} == set(names or [""])


def test_models_gpus_precisions_and_caption_lengths_are_never_mixed() -> None:
    base = run(1, 100.0, device="H100", precision="bf16", context_length=77)
    others: list[Any] = [
        {"model": "micro"},
        {"device": "A100"},
        {"precision": "fp32"},
        {"context_length": 514},
    ]
    rows = scaling_table([base, *(replace(base, nodes=2, gpus=8, **change) for change in others)])
    assert len({row.series for row in rows}) == 5
    assert {row.scaling_efficiency_percent for row in rows} == {100}


def engine_log(path: Path, nodes: int, step_s: float) -> Path:
    """Return DeepSpeed's log of 40 steps."""
    return write(path, running_log([9.0] * 5 + [step_s] * 35, batch=64 * nodes, every=5))


def test_engines_efficiency_of_each_scale_from_deepspeed_logs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """File names give the scales; steps take 1, 1.05 and 1.25 s."""
    scales = ((2, 1.0), (4, 1.05), (8, 1.25))
    logs = [engine_log(tmp_path / f"n{nodes}.log", nodes, step_s) for nodes, step_s in scales]
    options = ["--gpus_per_node", 4]
    command(
        monkeypatch, scaling.main, *logs, *options, "--rate", "engine", "--csv", tmp_path / "t.csv"
    )
    rows = read_table_runs(tmp_path / "t.csv")
    assert [(row.nodes, row.gpus, row.baseline_nodes) for row in rows] == [
        (2, 8, 2),
        (4, 16, 2),
        (8, 32, 2),
    ]
    assert [row.rate for row in rows] == pytest.approx([16, 16 / 1.05, 12.8])
    assert [row.scaling_efficiency_percent for row in rows] == pytest.approx([100, 100 / 1.05, 80])
    assert [row.speedup for row in rows] == pytest.approx([1, 2 / 1.05, 3.2])
    assert all("by the log's name" in row.notes for row in rows)
    assert "relative to 2 nodes" in capsys.readouterr().out


def test_engines_efficiency_of_run_directories_is_from_their_summary(tmp_path: Path) -> None:
    folders = []
    for nodes, measured, engine in ((1, 90.0, 100.0), (2, 81.0, 75.0)):
        summary = {
            "samples_per_s_per_gpu": {"mean": measured},
            "state": "completed",
            "achieved_tflops": 45.0,
        }
        summary |= {
            "num_nodes": nodes,
            "world_size": 4 * nodes,
            "deepspeed_samples_per_s": 4 * nodes * engine,
        }
        folders.append(record(tmp_path / f"n{nodes}", [], **summary))
    both, alone = (
        scaling_table(read_runs(folders, given(rate=rate))) for rate in ("measured", "deepspeed")
    )
    assert [(row.scaling_efficiency_percent, row.achieved_tflops) for row in both] == [
        (100, 45),
        (90, 45),
    ]
    assert [(row.scaling_efficiency_percent, row.achieved_tflops) for row in alone] == [
        (100, None),
        (75, None),
    ]


def test_each_cell_stands_under_its_heading_and_the_engines_rate_beside_the_measured() -> None:
    measured = ((1, 100.0, 110.0), (2, 90.0, 88.0))
    runs = [
        run(n, rate, deepspeed_samples_per_s_per_gpu=engine, achieved_tflops=41.5)
        for n, rate, engine in measured
    ]
    out = render(scaling_table(runs)).splitlines()
    header, _, first, second = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in out[2:6]
    )
    assert dict(zip(header, first, strict=True)) == {
        "nodes": "1", "GPUs": "4", "runs": "1", "samples/s/GPU ±": "100.0", "samples/s": "400.0", "efficiency % ±": "100.0",
        "speed-up": "1.00", "DeepSpeed's": "110.0", "TFLOPS/GPU": "41.50", "state": "completed [1]",
    }  # fmt: skip
    assert second[3:9] == ["90.00", "720.0", "90.0", "1.80", "88.00", "41.50"]


def test_each_column_has_the_value_that_its_heading_names() -> None:
    values = {
        "repeats": 7, "samples_per_s_per_gpu": 11.0, "samples_per_s": 12.0, "scaling_efficiency_percent": 13.0, "speedup": 14.0,
        "deepspeed_samples_per_s_per_gpu": 15.0, "micro_batch": 16, "achieved_tflops": 17.0, "mfu_published_percent": 18.0,
        "mfu_model_percent": 19.0, "step_time_s": 20.0, "slowest_rank_step_time_s": 21.0,
        "exposed_communication_percent": 22.0, "data_wait_percent": 23.0, "memory_peak_gib": 24.0, "joules_per_sample": 25.0,
        "energy_kwh": 26.0,
    }  # fmt: skip
    out = render([Row(nodes=2, gpus=8, state="completed", **values)]).splitlines()
    header, _, cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out[2:5])
    numbers = {name: cell.partition(".")[0] for name, cell in zip(header, cells, strict=True)}
    assert numbers == {
        "nodes": "2", "GPUs": "8", "runs": "7", "samples/s/GPU ±": "11", "samples/s": "12", "efficiency % ±": "13",
        "speed-up": "14", "DeepSpeed's": "15", "micro-batch": "16", "TFLOPS/GPU": "17", "MFU % published": "18",
        "MFU % model": "19", "s/step": "20", "slowest rank s": "21", "exposed comm. %": "22", "data wait %": "23",
        "memory GiB": "24", "J/sample": "25", "kWh": "26", "state": "completed",
    }  # fmt: skip


def test_speed_up_counts_gpus_not_nodes() -> None:
    rows = scaling_table([run(1, 100.0, gpus=4), run(2, 90.0, gpus=6)])
    assert [row.speedup for row in rows] == pytest.approx([1.0, 0.9 * 6 / 4])


def test_rates_that_spread_by_more_than_half_are_doubted() -> None:
    for rates, is_doubted in (((620.0, 1240.0, 2480.0), True), ((600.0, 610.0, 590.0), False)):
        (row,) = scaling_table([run(1, rate) for rate in rates])
        assert ("repeats of one scale" in row.notes) == is_doubted


def test_notes_are_numbered() -> None:
    text = render(
        scaling_table([run(1, 100.0), run(2, 90.0, notes="a"), run(4, 89.9, notes="b; a")])
    )
    for part in ("completed [2] [1] |", "completed [3] [2] [1] |", "\n\n[2] a\n\n[3] b\n"):
        assert part in text
