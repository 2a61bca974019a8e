"""Scaling tables by hand: repeats, uncertainty, weak and strong, failures, gaps."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import efficiency
from clap_ds.analysis.csv_table import read_table, read_table_runs
from clap_ds.analysis.efficiency import render, scaling_table
from clap_ds.analysis.table import Row, Run, write_csv
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, command, run, write


def test_failed_runs_stay_in_the_table_without_a_rate() -> None:
    runs = [run(1, 100.0), run(2, None, state="out_of_memory", error="CUDA out of memory;\n tried 2 GiB")]
    rows = scaling_table(runs)
    assert [row.state for row in rows] == ["completed", "out_of_memory"]
    assert (rows[1].samples_per_s_per_gpu, rows[1].scaling_efficiency_percent, rows[1].repeats) == (None, None, 0)
    assert "CUDA out of memory, tried 2 GiB" in rows[1].notes
    assert "nan" not in render(rows).lower()


def test_a_partial_rate_counts_only_where_nothing_completed() -> None:
    both = [run(1, 100.0), run(1, 50.0, state="timeout")]
    (row,) = scaling_table(both)
    assert (row.samples_per_s_per_gpu, row.repeats, row.state) == (100.0, 1, "1 completed, 1 timeout")
    assert "1 with a rate but not completed left out" in row.notes
    (row,) = scaling_table(both[1:])
    assert row.samples_per_s_per_gpu == 50.0
    assert "did not complete" in row.notes


def test_weak_and_strong_scaling_are_told_apart() -> None:
    weak = [run(nodes, 100.0, batch_per_gpu=64) for nodes in (1, 2, 4)]
    strong = [run(2, 80.0, batch_per_gpu=32), run(4, 60.0, batch_per_gpu=16)]
    of_weak = [("weak", 4, 100.0), ("weak", 8, 100.0), ("weak", 16, 100.0)]
    of_strong = [("strong", 4, 100.0), ("strong", 8, 80.0), ("strong", 16, 60.0)]
    for runs, found in ((weak, of_weak), ([weak[0], *strong], of_strong), (weak + strong, of_weak + of_strong)):
        rows = scaling_table(runs)
        assert [(row.scaling, row.gpus, row.scaling_efficiency_percent) for row in rows] == found


def test_a_scale_in_both_series_of_a_table_is_one_measurement(tmp_path: Path) -> None:
    runs = [run(1, 100.0, batch_per_gpu=64, interval=(98.0, 102.0))]
    runs += [run(2, 90.0, batch_per_gpu=64), run(2, 80.0, batch_per_gpu=32)]
    written = scaling_table(runs)
    write_csv(tmp_path / "t.csv", written)
    again = scaling_table(read_table_runs(tmp_path / "t.csv"))
    assert len(again) == len(written) == 4
    for first, second in zip(written, again, strict=True):
        assert (second.scaling, second.gpus, second.repeats) == (first.scaling, first.gpus, 1)
        assert second.scaling_efficiency_percent == pytest.approx(first.scaling_efficiency_percent)
        assert second.samples_per_s_per_gpu_2sigma == first.samples_per_s_per_gpu_2sigma


def test_models_gpus_precisions_and_caption_lengths_are_never_mixed() -> None:
    base = run(1, 100.0, device="H100", precision="bf16", text_tokens=77)
    others = [{"model": "micro"}, {"device": "A100"}, {"precision": "fp32"}, {"text_tokens": 514}]
    rows = scaling_table([base, *(replace(base, nodes=2, gpus=8, **change) for change in others)])  # type: ignore[arg-type]
    assert len({row.series for row in rows}) == 5
    assert all(row.scaling_efficiency_percent == 100 for row in rows)
    assert all("one scale only" in row.notes for row in rows)


def test_baseline_is_the_smallest_scale_with_a_rate_unless_given() -> None:
    def percents(runs: list[Run], baseline_nodes: int | None = None) -> list[float | None]:
        return [row.scaling_efficiency_percent for row in scaling_table(runs, baseline_nodes)]

    runs = [run(1, 110.0, gpus=1), run(1, 100.0, gpus=4), run(2, 90.0), run(4, 72.0)]
    assert percents(runs) == pytest.approx([100, 100 / 1.1, 90 / 1.1, 72 / 1.1])
    assert percents(runs, 1) == pytest.approx([110, 100, 90, 72])
    assert percents(runs, 2)[2:] == pytest.approx([100, 80])
    assert percents([run(1, None, state="failed"), *runs[2:]]) == [None, 100.0, pytest.approx(80.0)]
    with pytest.raises(UserError, match=r"--baseline_nodes 3.*\[1, 2, 4\]"):
        percents(runs, 3)
    other = replace(run(3, 9.0), model="micro")
    assert "no baseline: efficiency not given" in scaling_table([*runs, other], 3)[0].notes


def test_mfu_needs_a_peak_and_exposed_communication_is_its_share_of_the_parts() -> None:
    parts = {"forward_s": 0.4, "backward_s": 0.8, "exposed_communication_s": 0.6, "optimizer_s": 0.2}
    (row,) = scaling_table([run(1, 623.7, peak_tflops=989.0, mfu_model_percent=5.2, **parts)])
    assert (row.mfu_percent, row.mfu_model_percent) == (pytest.approx(21.04, abs=0.005), 5.2)
    assert row.exposed_communication_percent == pytest.approx(30.0)
    assert row.breakdown_s == pytest.approx({name[:-2]: seconds for name, seconds in parts.items()})
    assert scaling_table([run(1, 623.7)])[0].mfu_percent is None
    twice = scaling_table([run(1, 9.0, **parts), run(1, 9.0, **{name: 3 * seconds for name, seconds in parts.items()})])
    assert twice[0].breakdown_s == pytest.approx({name[:-2]: 2 * seconds for name, seconds in parts.items()})


def test_a_utilisation_that_cannot_be_is_said_to_be_none() -> None:
    (row,) = scaling_table([run(1, 2998.0, peak_tflops=989.0, mfu_model_percent=90.5)])
    assert "101.1 % in the published convention is no share of the peak" in row.notes
    assert "overstates by design" in row.notes
    assert "90.5 % of the work done is not possible" in row.notes
    assert scaling_table([run(1, 2940.0, peak_tflops=989.0, mfu_model_percent=89.0)])[0].notes.count("MFU") == 0


def test_an_efficiency_above_100_by_more_than_its_uncertainty_is_doubted() -> None:
    for interval, rate, doubted in ((None, 103.0, True), (None, 101.0, False), ((90.0, 110.0), 103.0, False)):
        rows = scaling_table([run(n, r, interval=interval) for n, r in ((1, 100.0), (2, rate), (4, 90.0))])
        assert [("above 100 %" in row.notes) for row in rows] == [False, doubted, False]
        assert rows[1].scaling_efficiency_percent == pytest.approx(rate)


def test_times_to_a_target_are_combined(tmp_path: Path) -> None:
    (row,) = scaling_table([run(1, 10.0, time_to_target_s=time) for time in (31.0, 27.0, 44.0, None)])
    assert (row.time_to_target_low_s, row.time_to_target_s, row.time_to_target_high_s) == (27.0, 31.0, 44.0)
    assert "target reached by 3 of 4 runs, after 31 s, 27 to 44 s (75 % interval of 3 runs)" in row.notes
    write_csv(tmp_path / "table.csv", [row])
    assert read_table(tmp_path / "table.csv")[0].time_to_target_s == 31.0


def test_a_batch_that_is_not_stated_leaves_the_scaling_open() -> None:
    rows = scaling_table([run(nodes, 100.0, batch_per_gpu=None) for nodes in (1, 2)])
    assert [row.scaling for row in rows] == ["", ""]
    assert rows[0].notes == "batch not stated: weak or strong scaling can't be told"
    alone = scaling_table([run(1, 100.0, batch_per_gpu=batch) for batch in (8, 16, None)])
    assert [row.batch_per_gpu for row in alone] == [8, 16, None]


def configured(nodes: int, rate: float | None = 90.0, environment: Any = None, **settings: Any) -> Run:
    """A run with these settings (a double underscore for a dot), and others that make no difference."""
    config: dict[str, Any] = {
        "clap": {"seed": rate, "output": {"label": str(nodes)}, "checkpoint": {"folder": f"{rate}"}}
    }
    for name, value in settings.items():
        *sections, last = name.split("__")
        section = config
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    return run(nodes, rate, config=config, environment=environment or {})


def titles(runs: list[Run]) -> dict[str, list[tuple[int, int]]]:
    """Of each series what it is called beyond the model, and the GPUs and repeats of its scales."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in scaling_table(runs):
        found.setdefault(row.title.removeprefix("htsat-tiny-roberta-base, "), []).append((row.gpus, row.repeats))
    return found


def test_runs_of_other_settings_are_no_repeats_but_series_named_by_what_differs(tmp_path: Path) -> None:
    sweep = [
        configured(nodes, rate, clap__gradient_sync=sync)
        for nodes in (1, 2)
        for rate, sync in ((90.0, "deepspeed"), (91.0, "deepspeed"), (99.0, "overlapped"))
    ]
    names = [f"gradient_sync={sync}, weak scaling" for sync in ("deepspeed", "overlapped")]
    assert titles(sweep) == {names[0]: [(4, 2), (8, 2)], names[1]: [(4, 1), (8, 1)]}
    rows = scaling_table(sweep)
    assert [row.rate for row in rows] == [90.5, 90.5, 99.0, 99.0]
    assert [len(row.runs) for row in rows] == [2, 2, 1, 1]
    assert all(f"### {rows[number].title}" in render(rows) for number in (0, 2))
    write_csv(tmp_path / "t.csv", rows)
    assert [row.series for row in scaling_table(read_table_runs(tmp_path / "t.csv"))] == [row.series for row in rows]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"zero_optimization__stage": 0}, {"zero_optimization__stage": 1},
         ["zero_optimization.stage=0", "zero_optimization.stage=1"]),
        ({"clap__data__shards": "/a/x.tar"}, {"clap__data__shards": "/b/y.tar"},
         ["data.shards=x.tar", "data.shards=y.tar"]),
        ({"clap__data__shards": "/a/x.tar"}, {"clap__data__shards": "/b/x.tar"}, []),
        ({"environment": {"git_commit": "a" * 40}}, {"environment": {"git_commit": "b" * 40 + "+"}},
         ["commit=aaaaaaaaaaaa", "commit=bbbbbbbbbbbb+"]),
        ({"environment": {"versions": {"clap_ds": "1.0"}}}, {"environment": {"versions": {"clap_ds": "1.1"}}},
         ["clap_ds=1.0", "clap_ds=1.1"]),
        ({"environment": {"device_names": ["H100", "H100"]}}, {"environment": {"device_names": ["H100", "A100"]}},
         ["devices=A100 and H100", "devices=H100"]),
        ({"environment": {"cpu_kernels": "AMX"}}, {"environment": {"cpu_kernels": "AVX-512"}},
         ["cpu_kernels=AMX", "cpu_kernels=AVX-512"]),
        ({"environment": {"hosts": ["n1"]}}, {"environment": {"hosts": ["n2"]}}, []),
    ],
)  # fmt: skip
def test_what_makes_runs_differ(first: Any, second: Any, names: list[str]) -> None:
    """Configuration, code and hardware; not seeds, labels, places and hosts. At another scale as well."""
    for nodes in (1, 2):
        found = titles([configured(1, 90.0, **first), configured(nodes, 91.0, **second)])
        expected = {f"{name}, weak scaling" for name in names} or {"weak scaling"}
        assert set(found) == expected


def test_differences_beside_the_one_in_the_name_are_in_a_note() -> None:
    commits = ({"git_commit": letter * 40} for letter in "ab")
    rows = scaling_table([
        configured(1, 90.0, next(commits), clap__gradient_sync="deepspeed"),
        configured(1, 99.0, next(commits), clap__gradient_sync="overlapped"),
    ])  # fmt: skip
    assert [row.variant for row in rows] == ["gradient_sync=deepspeed", "gradient_sync=overlapped"]
    assert all("series differ in commit, too" in row.notes for row in rows)


def test_what_all_runs_have_recorded_names_them_first() -> None:
    """An older version's record lacks settings that there were none of."""
    old = configured(1, 90.0, {"git_commit": "a" * 40})
    new = configured(1, 99.0, {"git_commit": "b" * 40}, clap__gradient_sync="overlapped")
    rows = scaling_table([old, new])
    assert [row.variant for row in rows] == ["commit=aaaaaaaaaaaa", "commit=bbbbbbbbbbbb"]
    assert "series differ in gradient_sync, too" in rows[0].notes


def test_a_run_whose_settings_are_not_recorded_is_no_repeat_of_one_whose_are() -> None:
    assert list(titles([configured(1), run(1, 91.0)])) == ["weak scaling", "settings not recorded, weak scaling"]
    assert titles([configured(1), run(1, None, state="failed")]) == {"weak scaling": [(4, 1)]}


def test_micro_batches_and_accumulation_have_rows_of_their_own() -> None:
    tried = [replace(configured(1, 10.0 * size), batch_per_gpu=size) for size in (8, 16, 16)]
    assert titles(tried) == {"batch per GPU 8": [(4, 1)], "batch per GPU 16": [(4, 2)]}
    accumulated = [replace(configured(1), accumulation=count) for count in (1, 4)]
    assert list(titles(accumulated)) == [f"gradient_accumulation_steps={n}, weak scaling" for n in (1, 4)]
    strong = [replace(configured(nodes), batch_per_gpu=8 // nodes, accumulation=2 // nodes) for nodes in (1, 2)]
    assert titles(strong) == {"strong scaling": [(4, 1), (8, 1)]}


def test_two_weak_series_are_named_by_their_batches_also_after_writing(tmp_path: Path) -> None:
    runs = [replace(configured(nodes), batch_per_gpu=size) for size in (8, 64) for nodes in (1, 2)]
    rows = scaling_table(runs)
    assert [row.variant for row in rows] == ["batch per GPU 8"] * 2 + ["batch per GPU 64"] * 2
    write_csv(tmp_path / "t.csv", rows)
    assert [row.series for row in scaling_table(read_table_runs(tmp_path / "t.csv"))] == [row.series for row in rows]


def test_a_learning_rate_that_follows_the_scale_is_pointed_out() -> None:
    follows = [configured(nodes, optimizer__params__lr=1e-3 * nodes) for nodes in (1, 2)]
    rows = scaling_table(follows)
    assert (len({row.series for row in rows}), rows[0].notes) == (
        1,
        "settings differ between scales: optimizer.params.lr",
    )
    varied = [*follows, configured(1, optimizer__params__lr=5e-3), configured(2, optimizer__params__lr=5e-3)]
    assert len({row.series for row in scaling_table(varied)}) == 3


@pytest.mark.parametrize(("device", "unit"), [("GH200", "GPU"), ("AMD EPYC", "rank")])
def test_what_runs_is_called_what_it_is(device: str, unit: str) -> None:
    header = render(scaling_table([run(1, 5.0, device=device)])).splitlines()[2]
    assert re.fullmatch(rf"\| +nodes \| +{unit}s \| +samples/s/{unit} ± \|.*", header)


def test_command_on_a_real_log_and_a_real_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    csv, markdown = tmp_path / "t.csv", tmp_path / "t.md"
    inputs = [DATA / "deepspeed_2ranks.log", DATA / "record_2ranks"]
    command(monkeypatch, efficiency.main, *inputs, "--csv", csv, "--markdown", markdown)
    assert capsys.readouterr().out == markdown.read_text()
    _, recorded = read_table(csv)
    summary = json.loads((DATA / "record_2ranks" / "summary.json").read_text())
    assert recorded.samples_per_s_per_gpu == pytest.approx(
        6 / sum(1 / rate for rate in summary["samples_per_s_per_gpu"]["windows"]), rel=1e-3
    )
    assert recorded.memory_peak_gib == pytest.approx(summary["memory_peak_bytes"] / 2**30, abs=0.01)


def test_the_engines_rate_is_a_column_and_can_be_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "[x] [INFO] nnodes={0}, num_local_procs=4\n[x] dist_world_size={1}\nrun directory: runs/x{0}\n"
    table = "┌──┬──┐\n│ samples/s/GPU │ {:.2f} │\n│ TFLOPS achieved per device, 3 × forward │ 41.5 │\n"
    table += "│ samples/s in all, by DeepSpeed's timer │ {:.2f} │\n└──┴──┘\n"
    for nodes, measured, engine in ((1, 100.0, 110.0), (2, 90.0, 88.0)):
        text = log.format(nodes, 4 * nodes) + table.format(measured, 4 * nodes * engine)
        write(tmp_path / f"{nodes}.log", text)
    for options, efficiency_percent, rate in (((), 90.0, "100.0"), (("--rate", "engine"), 80.0, "110.0")):
        command(monkeypatch, efficiency.main, tmp_path, "--csv", tmp_path / "t.csv", *options)
        printed = capsys.readouterr().out
        assert [row.engine_samples_per_s_per_gpu for row in read_table(tmp_path / "t.csv")] == [110.0, 88.0]
        assert read_table(tmp_path / "t.csv")[1].scaling_efficiency_percent == efficiency_percent
        lines = ([cell.strip() for cell in printed.splitlines()[line].split("|")] for line in (2, 4))
        first = dict(zip(*lines, strict=True))
        assert (first["samples/s/GPU ±"], first["engine's"]) == (rate, "110.0")
        assert first.get("TFLOPS/GPU") == (None if options else "41.50")
        assert printed.count("by DeepSpeed's timer, which leaves out the wait for data") == 1
    with pytest.raises(UserError, match="no input has a rate of DeepSpeed's timer"):
        efficiency.by_engine([run(1, 100.0)])
    told = run(2, 90.0, samples_per_s=720.0, engine_samples_per_s_per_gpu=80.0)
    (row,) = scaling_table(efficiency.by_engine([run(1, 100.0), told]))
    assert row.samples_per_s == 640.0
    assert "left out: here" in capsys.readouterr().err


def test_scales_below_the_target_are_marked() -> None:
    text = render(scaling_table([run(1, 100.0, micro_batch=8), run(2, 90.0), run(4, 89.9)]), target=90)
    assert re.findall(r"(\d+\.\d+) ▼", text) == ["89.9"]
    assert "Target of 90 % efficiency: below it (▼): 4 nodes, 16 GPUs." in text
    assert "no scale is below it" in render(scaling_table([run(1, 100.0), run(2, 90.0)]), target=90)
    assert "▼" not in render(scaling_table([run(1, 100.0), run(2, 90.0)]))
    assert "| micro-batch |" in text


def test_an_error_has_the_decimals_of_its_value() -> None:
    text = render(scaling_table([run(1, 623.71, interval=(623.71 - 1e-12, 623.71 + 1e-12), uncertainty_from="x")]))
    assert " 623.7 ± 0.0 " in text
    tiny, usual = (Row(samples_per_s_per_gpu=492.31, samples_per_s_per_gpu_2sigma=half) for half in (5e-12, 3.2154))
    assert [row.cell("samples_per_s_per_gpu_2sigma") for row in (tiny, usual)] == ["0", "3.215"]
