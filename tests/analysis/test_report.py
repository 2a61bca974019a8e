"""Contents of a report on real runs."""

import csv
import json
import re
from pathlib import Path

import pytest

from clap_ds.analysis import report
from clap_ds.config.paths import VERSION
from tests.analysis.samples import DATA, TINY, command, record

SUMMARY, ENVIRONMENT = (
    json.loads((DATA / f"record_2ranks/{name}.json").read_text()) for name in ("summary", "environment")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report on a real run, a published table and a failed run's log."""
    output = tmp_path_factory.mktemp("report") / "out"
    inputs = [DATA / "record_2ranks", TINY, DATA / "deepspeed_failed.log"]
    arguments = ["--output", output, "--nodes", "1", "--gpus", "2"]
    with pytest.MonkeyPatch.context() as patch:
        command(patch, report.main, *inputs, *arguments)
    return output


def test_has_every_section_and_picture_and_needs_nothing_outside(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Summary", "Efficiency", "Where a step's time goes", "Projection", "Runs",
    ]  # fmt: skip
    assert f"by version {VERSION}" in text
    shown = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text())
    assert {re.sub(r"-\d+", "", name) for name in shown} == {"scaling.png", "breakdown.png", "projection.png"}
    assert sorted(shown) == sorted(path.name for path in folder.glob("*.png"))
    references = re.findall(r'\b(?:src|href)="(.*?)"', text)
    assert len(references) == len(shown)
    assert all(reference.startswith("data:image/png;base64,iVBOR") for reference in references)
    assert not re.search(r"\b(nan|None|inf)\b", re.sub(r'src="data:.*?"', "", text))


def test_numbers_and_versions_are_the_inputs_own(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    lines = [re.findall("<td.*?>(.*?)</td>", line, re.DOTALL) for line in re.findall("<tr>(.*?)</tr>", text, re.DOTALL)]
    for row in csv.DictReader(TINY.open()):
        start = [row["nodes"], row["gpus"], "1", row["samples_per_s_per_gpu"]]
        found = next(line for line in lines if line[:4] == start)  # in the efficiency table
        assert found[5] == row["scaling_efficiency_percent"]
    shown = {cell for line in lines for cell in line}
    assert f"{SUMMARY['breakdown_s']['forward']:#.4g}" in shown
    assert "87.3% efficiency on 512 GPUs: 544.6 samples/s/GPU." in text[: text.index(">Efficiency<")]
    runs = (folder / "report.md").read_text().partition("## Runs")[2]
    versions = ENVIRONMENT["versions"]
    for part in (versions["torch"], versions["deepspeed"], " ".join(ENVIRONMENT["command"]), " 544.6 | published |"):
        assert part in runs


def test_tables_of_cpu_ranks_have_no_gpus(folder: Path) -> None:
    steps = (folder / "report.md").read_text().partition("## Where a step's time goes")[2].partition("## Projection")[0]
    headers = re.findall(r"### (.+)\n\n\| nodes \| +(\w+) \|", steps)
    assert {("Xeon" in title, unit) for title, unit in headers} == {(True, "ranks"), (False, "GPUs")}


def test_a_failed_run_alone_still_makes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {key: SUMMARY[key] for key in ("preset", "num_nodes", "world_size", "micro_batch_per_gpu", "precision")}
    failed = record(tmp_path / "run", [], **kept, state="out_of_memory", error="too <big>")
    command(monkeypatch, report.main, failed, "--output", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    for part in ("No rate was measured (out_of_memory)", "too &lt;big&gt;"):
        assert part in text
    assert "<big>" not in text
