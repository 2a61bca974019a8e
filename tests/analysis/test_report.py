"""Contents of a report on real runs."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import report
from clap_ds.analysis.table import Row, write_csv
from clap_ds.utils.paths import VERSION
from tests.analysis.samples import DATA, TINY, command, record

SUMMARY, ENVIRONMENT = (
    json.loads((DATA / f"record_2ranks/{name}.json").read_text())
    for name in ("summary", "environment")
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
    assert {re.sub(r"-\d+", "", name) for name in shown} == {
        "scaling.png",
        "breakdown.png",
        "projection.png",
    }
    assert sorted(shown) == sorted(path.name for path in folder.glob("*.png"))
    references = re.findall(r'\b(?:src|href)="(.*?)"', text)
    assert len(references) == len(shown)
    assert all(reference.startswith("data:image/png;base64,iVBOR") for reference in references)
    assert not re.search(r"\b(nan|None|inf)\b", re.sub(r'src="data:.*?"', "", text))


def test_numbers_and_versions_are_the_inputs_own(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    lines = [
        re.findall("<td.*?>(.*?)</td>", line, re.DOTALL)
        for line in re.findall("<tr>(.*?)</tr>", text, re.DOTALL)
    ]
    for row in csv.DictReader(TINY.open()):
        start = [row["nodes"], row["gpus"], "1", row["samples_per_s_per_gpu"]]
        found = next(line for line in lines if line[:4] == start)  # in the efficiency table
        assert found[5] == row["scaling_efficiency_percent"]
    shown = {cell for line in lines for cell in line}
    assert f"{SUMMARY['breakdown_s']['forward']:#.4g}" in shown
    assert (
        "87.3% efficiency on 512 GPUs: 544.6 samples/s/GPU." in text[: text.index(">Efficiency<")]
    )
    runs = (folder / "report.md").read_text().partition("## Runs")[2]
    versions = ENVIRONMENT["versions"]
    for part in (
        versions["torch"],
        versions["deepspeed"],
        " ".join(ENVIRONMENT["command"]),
        " 544.6 | published |",
    ):
        assert part in runs


def test_tables_of_cpu_ranks_have_no_gpus(folder: Path) -> None:
    steps = (
        (folder / "report.md")
        .read_text()
        .partition("## Where a step's time goes")[2]
        .partition("## Projection")[0]
    )
    headers = re.findall(r"### (.+)\n\n\| nodes \| +(\w+) \|", steps)
    assert {("Xeon" in title, unit) for title, unit in headers} == {
        (True, "ranks"),
        (False, "GPUs"),
    }


def test_a_failed_run_alone_still_makes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {
        key: SUMMARY[key]
        for key in ("preset", "num_nodes", "world_size", "micro_batch_per_gpu", "precision")
    }
    failed = record(tmp_path / "run", [], **kept, state="out_of_memory", error="too <big>")
    command(monkeypatch, report.main, failed, "--output", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    for part in ("No rate was measured (out_of_memory)", "too &lt;big&gt;"):
        assert part in text
    assert "<big>" not in text


PAYLOAD = "` ](http://a.b) ![x](http://a.b)\n# Fake heading\n\n<img src=x> <script>a</script> \x1b[31m | **b** ~~c~~"


def with_payload(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: with_payload(value) for name, value in content.items()}
    if isinstance(content, list):
        return [with_payload(value) for value in content]
    return f"{content} {PAYLOAD}" if isinstance(content, str) else content


def test_no_text_of_a_record_is_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("summary", "environment", "config"):
        content = json.loads((DATA / f"record_2ranks/{name}.json").read_text())
        if name == "summary":
            slow = {"rank": 1, "host": "n1", "lag_s": 1.0, "lag_percent": 2.0, "data_wait_s": 0.1}
            content |= {"error": "why", "finished": "", "stragglers": [slow]}
        (folder / f"{name}.json").write_text(json.dumps(with_payload(content)))
    table = tmp_path / "table.csv"
    write_csv(table, [Row(n, 4 * n, 5.0, model="m", scaling=with_payload("s"), state=with_payload("x"), notes=with_payload("n"),
                          uncertainty_from=with_payload("u"), samples_per_s_per_gpu_ci95=0.1) for n in (1, 2)])  # fmt: skip
    command(monkeypatch, report.main, folder, table, "--output", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    body = text.partition("<body>")[2]
    allowed = set("h1 h2 h3 h4 p em strong code img ul li table thead tbody tr th td".split())  # noqa: SIM905
    assert {*re.findall(r"<(\w+)", body)} <= allowed
    assert all(
        source.startswith('src="data:image/png') for source in re.findall(r'src="[^"]*', body)
    )
    assert not re.search("<h[1-6]>Fake|<strong>b<|href|\x1b", text)
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "Fake heading" in markdown
    assert not re.search(
        r"\x1b|^# Fake|<img|<script|(?<!!\[)\]\(|\*\*b\*\*", markdown, re.MULTILINE
    )
    assert markdown.count("`") == 2
