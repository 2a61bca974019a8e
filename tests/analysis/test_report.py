"""Contents of a report on real runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import report
from clap_ds.analysis.table import Row, write_csv
from clap_ds.utils.paths import VERSION
from tests.analysis.samples import DATA, TINY, run_main

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
    run_main(report.main, *inputs, *arguments)
    return output


def read_section(folder: Path, title: str) -> str:
    markdown = (folder / "report.md").read_text()
    return markdown.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_report_has_every_section_and_picture_and_needs_no_other_file(folder):
    text = (folder / "report.html").read_text()
    sections = ["Summary", "Efficiency", "Where a step's time goes", "Projection", "Runs"]
    assert re.findall("<h2>(.*?)</h2>", text) == sections
    assert f"by version {VERSION}" in text
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text())
    kinds = {re.sub(r"-\d+", "", name) for name in pictures}
    assert kinds == {"scaling.png", "breakdown.png", "projection.png"}
    references = re.findall(r'\b(?:src|href)="(.*?)"', text)
    assert len(references) == len(pictures)
    assert all(reference.startswith("data:image/png;base64,iVBOR") for reference in references)
    assert not re.search(r"\b(nan|None|inf)\b", re.sub(r'src="data:.*?"', "", text))


def test_report_has_the_numbers_and_versions_of_its_inputs(folder):
    efficiency = read_section(folder, "Efficiency")
    assert re.search(r"\| +128 \| +512 \| +1 \| +544\.6 \| +[0-9.]+ \| +87\.3 ", efficiency)
    steps = read_section(folder, "Where a step's time goes")
    assert f"{SUMMARY['breakdown_s']['forward']:#.4g}" in steps
    assert "| nodes | ranks |" in re.sub(" +", " ", steps)
    summary = "87.3% efficiency on 512 GPUs: 544.6 samples/s/GPU."
    assert summary in read_section(folder, "Summary")
    runs = read_section(folder, "Runs")
    versions = ENVIRONMENT["versions"]
    command_line = " ".join(ENVIRONMENT["command"])
    for text in (versions["torch"], command_line, " 544.6 | published |"):
        assert text in runs


PAYLOAD = "` ](http://a.b) ![x](http://a.b)\n# Fake heading\n\n<img src=x> <script>a</script> \x1b[31m | **b** ~~c~~"


def add_payload(content: Any) -> Any:
    """Append the payload to all texts."""
    if isinstance(content, dict):
        return {name: add_payload(value) for name, value in content.items()}
    if isinstance(content, list):
        return [add_payload(value) for value in content]
    return f"{content} {PAYLOAD}" if isinstance(content, str) else content


def test_text_of_a_record_is_no_markup(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    slow = {"rank": 1, "host": "n1", "lag_s": 1.0, "lag_percent": 2.0, "data_wait_s": 0.1}
    summary = {**SUMMARY, "error": "why", "finished": "", "stragglers": [slow]}
    for name, content in (("summary", summary), ("environment", ENVIRONMENT)):
        (folder / f"{name}.json").write_text(json.dumps(add_payload(content)))
    texts = {name: add_payload("x") for name in ("scaling", "state", "notes", "uncertainty_from")}
    rows = [Row(n, 4 * n, 5.0, model="m", samples_per_s_per_gpu_ci95=0.1, **texts) for n in (1, 2)]
    write_csv(tmp_path / "table.csv", rows)
    run_main(report.main, folder, tmp_path / "table.csv", "--output", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    tags = {*re.findall(r"<(\w+)", text.partition("<body>")[2])}
    allowed = "h1 h2 h3 h4 p em strong code img ul li table thead tbody tr th td"
    assert tags <= {*allowed.split()}
    assert text.count('src="') == text.count('src="data:image/png')
    assert not re.search("<h[1-6]>Fake|<strong>b<|href|\x1b", text)
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "Fake heading" in markdown
    markup = r"\x1b|^# Fake|<img|<script|(?<!!\[)\]\(|\*\*b\*\*"
    assert not re.search(markup, markdown, re.MULTILINE)
    assert markdown.count("`") == 2
