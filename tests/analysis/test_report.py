"""The report: everything in it, from real runs."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clap_ds.analysis import cost, report
from clap_ds.analysis.project import method_of
from clap_ds.analysis.provenance import gaps
from clap_ds.analysis.report import changes_with_scale, headline, projectable, published_comparison
from clap_ds.analysis.step_model import Machine
from clap_ds.analysis.table import Row, Run, Scale, write_csv
from clap_ds.config.errors import UserError
from clap_ds.config.places import VERSION
from clap_ds.config.settings import ClapSettings
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
        "Cost of 1e+09 samples", "Runs", "What is missing",
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
    assert text.count('class="hover"><title>') > 40
    shown = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text())
    assert {re.sub(r"-\d+", "", name) for name in shown} == {"scaling.png", "breakdown.png", "projection.png"}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in shown)
    assert sorted(shown) == sorted(path.name for path in folder.glob("*.png"))
    assert text.count("<svg") == len(shown)


def test_numbers_are_the_inputs_own(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    lines = [re.findall("<td>(.*?)</td>", line, re.DOTALL) for line in re.findall("<tr>(.*?)</tr>", text, re.DOTALL)]
    for row in csv.DictReader(TINY.open()):
        start = [row["nodes"], row["gpus"], row["samples_per_s_per_gpu"]]
        (found,) = [line for line in lines if line[:3] == start and len(line) == 13]
        assert found[4] == row["scaling_efficiency_percent"]
    shown = {cell for line in lines for cell in line}
    assert f"{1000 * SUMMARY['breakdown_s']['forward']:.1f}" in shown
    assert f"{SUMMARY['samples_per_s_per_gpu']['median'] / 623.7:.6f}" in shown
    assert any(cell.startswith("890.") for cell in shown)  # 1e9 / 623.7 / 3600 GPU-hours at 2 each


def test_says_where_numbers_come_from_and_what_is_missing(folder: Path) -> None:
    runs, missing = (folder / "report.md").read_text().partition("## Runs")[2].split("## What is missing")
    versions = ENVIRONMENT["versions"]
    for part in (versions["torch"], versions["deepspeed"], " ".join(ENVIRONMENT["command"]), "1–128"):
        assert part in runs
    for part in ("deepspeed_failed.log: state failed", "git commit not recorded: record_2ranks",
                 "no record of versions, commit or command: jupiter_htsat_tiny.csv, deepspeed_failed.log",
                 "no breakdown of the step"):  # fmt: skip
        assert part in missing


def test_a_failed_run_alone_still_makes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {key: SUMMARY[key] for key in ("preset", "num_nodes", "world_size", "micro_batch_per_gpu", "precision")}
    failed = record(tmp_path / "run", [], **kept, state="out_of_memory", error="too <big>")
    command(monkeypatch, report.main, failed, "--output", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "no rate was measured (out_of_memory)" in text
    assert "too &lt;big&gt;" in text
    assert "<big>" not in text


def test_method_follows_the_configuration() -> None:
    assert method_of({}).loss == "gather_with_grad"
    found = method_of({"bf16": {"enabled": True}, "clap": {"gradient_sync": "deepspeed", "gradient_bucket_mb": 5.0}})
    assert (found.overlap, found.gradient_bytes, found.feature_bytes) == (False, 2, 2)
    assert (found.loss, found.bucket_bytes) == ("exact_local", 5e6)
    assert method_of({"torch_autocast": {"enabled": True}}).feature_bytes == 2
    older = method_of({"clap": {"loss": {"features": "bf16"}}})
    assert (older.gradient_bytes, older.bucket_bytes) == (4, 1e6 * ClapSettings().gradient_bucket_mb)


@pytest.fixture
def poor(tmp_path: Path) -> Path:
    """A table that scales poorly: 600, 480, 400 and 330 samples/s in all on 1 to 8 nodes."""
    totals = {1: 600.0, 2: 480.0, 4: 400.0, 8: 330.0}
    changes = {"model": "htsat_tiny_roberta_base", "device": "H100", "scaling": "weak", "batch_per_gpu": 64}
    rows = [Row(nodes, 4 * nodes, total / 4 / nodes, total, **changes) for nodes, total in totals.items()]
    write_csv(tmp_path / "poor.csv", rows)
    return tmp_path / "poor.csv"


def test_a_table_that_scales_poorly_has_a_whole_report(poor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, report.main, poor, "--output", poor.parent / "out")
    text = (poor.parent / "out" / "report.md").read_text()
    (row,) = {line.split("|")[2].strip() for line in text.splitlines() if "can't be" in line}
    assert row == "can't be: communication and delays alone take longer"
    assert "## What is missing" in text
    assert (poor.parent / "out" / "projection-1.png").stat().st_size > 5000


def test_a_part_that_cannot_be_made_is_named_in_its_place(poor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of all things")

    for owner, name in ((cost, "costs"), (report.plot_scaling, "draw"), (report, "published_comparison")):
        monkeypatch.setattr(owner, name, broken)
    command(monkeypatch, report.main, poor, "--output", poor.parent / "out", "--samples", "1e9")
    text = (poor.parent / "out" / "report.md").read_text()
    for heading, what in (
        ("Efficiency", "The picture"), ("Against the published tables", "This part"), ("Cost of 1e+09 samples", "This part"),
    ):  # fmt: skip
        section = text[text.index(f"## {heading}\n") :].partition("\n## ")[0]
        assert f"**{what} can't be made**: ZeroDivisionError: of all things." in section
    assert "| nodes |" in text[text.index("## Efficiency") :].partition("\n## ")[0].replace("  ", " ")
    assert "projection-1.png" in text
    assert "**" not in text[text.index("## Runs") :]


def test_headline_and_gaps_of_two_scales() -> None:
    percents = {"scaling_efficiency_percent": 90.0, "scaling_efficiency_2sigma_percent": 1.5}
    rows = [Row(1, 4, 10.0, 40.0, model="micro", repeats=2), Row(2, 8, 9.0, 72.0, model="micro", repeats=2, **percents)]
    rows = [replace(row, uncertainty_from="75 % interval of 3 windows of 1 run") for row in rows]
    runs = [Run(source="a", state="completed"), Run(source="b", state="failed", error="x")]
    assert (
        "9.000 samples/s/GPU on 8 GPUs (2 nodes), 90.0 ± 1.5 % of the rate per GPU on 4 GPUs (± from 75 % interval"
        in headline(runs, rows)
    )
    assert "2 runs, at 2 scales" in headline(runs, rows)
    found = "\n".join(gaps(rows, runs))
    assert "b: state failed: x" in found
    assert "no spread known at 4, 8 GPUs" in found
    assert "one run only" not in found
    differing = [Run(environment={"git_commit": sign, "versions": {"torch": sign}}) for sign in "ab"]
    *_, commit, versions = gaps([], differing)
    assert (commit[:21], versions[:23]) == ("runs differ in commit", "runs differ in versions")


def test_the_part_that_grew_most_with_scale() -> None:
    rows = [Row(n, 4 * n, 9.0, forward_s=0.2, exposed_communication_s=0.1 * n) for n in (1, 2)]
    assert changes_with_scale(rows) == "From 4 to 8 GPUs, exposed communication grew most: +100.0 ms a step."
    assert changes_with_scale([rows[0], Row(2, 8, 9.0, forward_s=0.1)]).startswith("No part")
    assert changes_with_scale(rows[:1]) == ""


def test_strong_scaling_and_unpublished_models_have_no_projection_and_no_comparison() -> None:
    with pytest.raises(UserError, match="Not for strong scaling"):
        projectable([Scale(1, 4, 9.0, scaling="strong")], Machine())
    assert "none of these was measured here" in published_comparison([Row(1, 4, 9.0, model="micro")])
    assert "the ratio compares machines" in published_comparison([run(1, 9.0, device="H100")])
