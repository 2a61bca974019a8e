"""The report: everything in it, from real runs."""

import csv
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clap_ds.analysis import cost, report
from clap_ds.analysis.record import read_record
from clap_ds.analysis.report import findings, published_comparison
from clap_ds.analysis.table import Row, write_csv
from clap_ds.config.places import VERSION
from tests.analysis.samples import DATA, ROOT, TINY, command, record, run

SUMMARY, ENVIRONMENT = (
    json.loads((DATA / f"record_2ranks/{name}.json").read_text()) for name in ("summary", "environment")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a real run, a published table and a log of a failed run."""
    output = tmp_path_factory.mktemp("report") / "out"
    inputs = [DATA / "record_2ranks", TINY, DATA / "deepspeed_failed.log"]
    arguments = ["--output", output, "--nodes", "1", "--gpus", "2", "--samples", "1e9", "--price_per_gpu_hour", "2"]
    words = [sys.executable, "-X", "importtime", "-m", "analysis.report", *inputs, *arguments]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "clap_ds.analysis.project" in imported
    assert not {"torch", "deepspeed", "transformers"} & imported
    return output


def test_has_every_section_and_picture_and_needs_nothing_outside(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    headings = re.findall('<h2 id="(.*?)">(.*?)</h2>', text)
    assert [heading for _, heading in headings] == [
        "Efficiency", "Against the published tables", "Where a step's time goes", "Projection",
        "Runs", "Cost of 1e+09 samples",
    ]  # fmt: skip
    contents = re.findall('<a href="#(.*?)">(.*?)</a>', text)
    assert contents == headings
    made = datetime.fromtimestamp((folder / "report.html").stat().st_mtime, UTC)
    assert f"{made:%Y-%m-%d}" in text
    assert f"by version {VERSION}" in text
    assert text.count("<figcaption>") == text.count("<svg")
    assert "At 2 (currency not given" in text
    references, ids = re.findall(r'\b(?:src|href)="(.*?)"', text), re.findall(r'\bid="(.*?)"', text)
    assert len(ids) == len(set(ids))
    assert set(references) <= {f"#{name}" for name in ids}
    assert not re.search(r"\b(nan|None|inf)\b", re.sub(r"<(style|svg).*?</\1>", "", text, flags=re.DOTALL))
    shown = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text())
    assert {re.sub(r"-\d+", "", name) for name in shown} == {"scaling.png", "breakdown.png", "projection.png"}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in shown)
    assert sorted(shown) == sorted(path.name for path in folder.glob("*.png"))
    assert text.count("<svg") == len(shown)


def test_numbers_are_the_inputs_own(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    lines = [re.findall("<td.*?>(.*?)</td>", line, re.DOTALL) for line in re.findall("<tr>(.*?)</tr>", text, re.DOTALL)]
    for row in csv.DictReader(TINY.open()):
        start = [row["nodes"], row["gpus"], row["samples_per_s_per_gpu"]]
        (found,) = [line for line in lines if line[:3] == start and len(line) == 9]  # the table of efficiencies
        assert found[4] == row["scaling_efficiency_percent"]
    shown = {cell for line in lines for cell in line}
    assert f"{SUMMARY['breakdown_s']['forward']:#.4g}" in shown
    assert f"{(read_record(DATA / 'record_2ranks').rate or 0) / 623.7:.6f}" in shown
    assert any(cell.startswith("890.") for cell in shown)  # 1e9 / 623.7 / 3600 GPU-hours at 2 each
    top = text[: text.index(">Contents:")]
    for part in ("87.3 % efficiency on 512 GPUs: 544.6 samples/s/GPU, 278833 samples/s in all.",
                 "90 % efficiency or more up to 64 nodes, 256 GPUs.", "Projected: 73.8 % efficiency on 2048 GPUs"):  # fmt: skip
        assert part in top
    in_runs = text[text.index('id="runs"') :]
    for rate in ("544.6–623.7", read_record(DATA / "record_2ranks").cell("samples_per_s_per_gpu")):
        assert f"<td>{rate}</td>" in in_runs


def test_says_where_numbers_come_from(folder: Path) -> None:
    runs = (folder / "report.md").read_text().partition("## Runs")[2]
    versions = ENVIRONMENT["versions"]
    for part in (versions["torch"], versions["deepspeed"], " ".join(ENVIRONMENT["command"]), "1–128"):
        assert part in runs


def test_a_failed_run_alone_still_makes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {key: SUMMARY[key] for key in ("preset", "num_nodes", "world_size", "micro_batch_per_gpu", "precision")}
    failed = record(tmp_path / "run", [], **kept, state="out_of_memory", error="too <big>")
    (failed / "monitor").mkdir()
    (failed / "monitor" / "n1.jsonl").write_text('{"time": 1, "gpu": 0, "sm_percent": 80}\n')
    command(monkeypatch, report.main, failed, "--output", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "No rate was measured (out_of_memory)" in text
    assert "too &lt;big&gt;" in text
    assert "<big>" not in text
    assert ">100% (most n1:0)</td>" in text


def test_a_part_that_cannot_be_made_is_named_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of all things")

    for owner, name in ((cost, "costs"), (report.plot_scaling, "draw"), (report, "published_comparison")):
        monkeypatch.setattr(owner, name, broken)
    rows = [Row(nodes, 4 * nodes, rate, 4 * nodes * rate, model="htsat_tiny_roberta_base", device="H100", batch_per_gpu=64)
            for nodes, rate in ((1, 150.0), (2, 60.0), (4, 25.0), (8, 10.3))]  # fmt: skip
    write_csv(tmp_path / "poor.csv", rows)
    command(monkeypatch, report.main, tmp_path / "poor.csv", "--output", tmp_path / "out", "--samples", "1e9")
    text = (tmp_path / "out" / "report.md").read_text()
    for heading in ("Efficiency", "Against the published tables", "Cost of 1e+09 samples"):
        section = text[text.index(f"## {heading}\n") :].partition("\n## ")[0]
        assert "**This part can't be made**: ZeroDivisionError: of all things." in section
        assert (heading == "Efficiency") == ("samples/s/GPU" in section)  # what could be made of it stays
    assert "projection-1.png" in text


def test_findings_of_two_scales() -> None:
    percents = {"scaling_efficiency_percent": 89.0, "scaling_efficiency_2sigma_percent": 1.5}
    notes = "one scale only; outlier kept: 8.0 samples/s/GPU in b, -11.0 % from the other repeats"
    rows = [Row(1, 4, 10.0, 40.0, model="micro", repeats=2, scaling_efficiency_percent=100.0),
            Row(2, 8, 8.9, 71.2, model="micro", repeats=2, notes=notes, uncertainty_from="windows", **percents)]  # fmt: skip
    assert list(findings(rows)) == [
        "89.0 ± 1.50 % efficiency on 8 GPUs: 8.900 samples/s/GPU, 71.20 samples/s in all.",
        "90 % efficiency or more up to 1 node, 4 GPUs.",
        "± from: windows.",
        "On 2 nodes, 8 GPUs: outlier kept: 8.0 samples/s/GPU in b, -11.0 % from the other repeats.",
    ]


def test_models_that_are_not_published_have_no_comparison() -> None:
    assert "none of these was measured here" in published_comparison([Row(1, 4, 9.0, model="micro")])
    assert "the ratio compares machines" in published_comparison([run(1, 9.0, device="H100")])
