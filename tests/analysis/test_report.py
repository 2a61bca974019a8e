"""The report: everything in it, from real runs, in a real browser."""

import csv
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from clap_ds.analysis import report
from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.report_parts import by_series, gaps, headline, method_of
from clap_ds.analysis.runs import Run
from clap_ds.analysis.table import Row
from tests.analysis.browser import rendered

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("data")
INPUTS = [DATA / "record_2ranks", PUBLISHED_DIR / "jupiter_htsat_tiny.csv", DATA / "deepspeed_failed.log"]

PROBE = """<script>
const mark = document.querySelector(".hover");
const box = mark.getBoundingClientRect();
const at = {clientX: (box.left + box.right) / 2, clientY: (box.top + box.bottom) / 2, bubbles: true};
document.dispatchEvent(new MouseEvent("mousemove", at));
const shown = getComputedStyle(tip).display;
const covered = points.filter(p => covers(p.mark, at.clientX, at.clientY)).map(p => p.text).join("|");
const sizes = [...document.querySelectorAll("svg")].map(s => Math.round(s.getBoundingClientRect().height));
document.body.dataset.probe = JSON.stringify({shown, tip: tip.textContent, covered, sizes, area: box.width * box.height});
</script></body>"""


class Page(HTMLParser):
    """Headings, tables' cells and ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.probe: dict[str, object] = {}
        self._into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []
        self.references += [values[name] or "" for name in ("src", "href", "xlink:href") if name in values]
        if tag == "body" and values.get("data-probe"):
            self.probe = json.loads(values["data-probe"] or "")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._into = self.tables[-1][-1]
        elif tag in ("h1", "h2"):
            self.headings.append("")
            self._into = self.headings

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "h1", "h2"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a real run, a published table and a log of a failed run."""
    output = tmp_path_factory.mktemp("report") / "out"
    arguments = ["--output", output, "--nodes", "1", "--gpus", "2", "--samples", "1e9", "--price_per_gpu_hour", "2"]
    command = [sys.executable, "-X", "importtime", "analysis/report.py", *INPUTS, *arguments]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "clap_ds.analysis.report_parts" in imported
    assert not {"torch", "deepspeed", "transformers"} & imported
    return output


def test_has_every_section_and_needs_nothing_outside(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.headings[1:] == [
        "Efficiency", "Against the published tables", "Where a step's time goes", "Projection",
        "Cost of 1e+09 samples", "Runs", "What is missing",
    ]  # fmt: skip
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"\b(nan|None|inf)\b", re.sub(r"<(script|style|svg).*?</\1>", "", text, flags=re.DOTALL))
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)


def test_numbers_are_the_inputs_own(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    cells = {tuple(row) for table in page.tables for row in table}
    for row in csv.DictReader((PUBLISHED_DIR / "jupiter_htsat_tiny.csv").open()):
        start = (row["nodes"], row["gpus"], row["samples_per_s_per_gpu"])
        (found,) = [cell for cell in cells if cell[:3] == start and len(cell) == 13]
        assert found[4] == row["scaling_efficiency_percent"]
    summary = json.loads((DATA / "record_2ranks" / "summary.json").read_text())
    forward_ms = f"{1000 * summary['breakdown_s']['forward']:.1f}"
    assert any(forward_ms in row for row in cells)
    ratio = summary["samples_per_s_per_gpu"]["median"] / 623.7
    assert any(f"{ratio:.6f}" in row for row in cells)
    hours = 1e9 / 623.7 / 4 / 3600
    assert any(f"{hours * 4 * 2:.2f}"[:4] in cell for row in cells for cell in row)


def test_says_where_numbers_come_from_and_what_is_missing(folder: Path) -> None:
    markdown = (folder / "report.md").read_text()
    environment = json.loads((DATA / "record_2ranks" / "environment.json").read_text())
    runs = markdown[markdown.index("## Runs") : markdown.index("## What is missing")]
    assert environment["versions"]["torch"] in runs
    assert environment["versions"]["deepspeed"] in runs
    assert " ".join(environment["command"]) in runs
    missing = markdown[markdown.index("## What is missing") :]
    for said in (
        "deepspeed_failed.log: state failed",
        "git commit not recorded: record_2ranks",
        "no breakdown of the step",
    ):
        assert said in missing


def test_markdown_shows_the_pictures_beside_it(folder: Path) -> None:
    shown = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text())
    assert {"scaling.png"} < set(shown)
    assert any(name.startswith("projection") for name in shown)
    assert any(name.startswith("breakdown") for name in shown)
    for name in shown:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert sorted(shown) == sorted(path.name for path in folder.glob("*.png"))


def test_a_browser_renders_it_and_hovering_shows_values(folder: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    text = (folder / "report.html").read_text()
    probed.write_text(text.replace("</body>", PROBE))
    dom = rendered(probed, tmp_path / "profile")
    page = Page(dom)
    assert page.probe, "the page's script did not run to its end"
    assert page.probe["shown"] == "block"
    assert page.probe["area"]
    assert page.probe["tip"] == str(page.probe["covered"]).replace("|", "\n\n")
    assert "samples/s/GPU" in str(page.probe["tip"])
    sizes = page.probe["sizes"]
    assert isinstance(sizes, list)
    assert len(sizes) == text.count("<svg")
    assert all(size > 100 for size in sizes)
    assert page.tables == Page(text).tables
    # The script takes the browser's own tooltips away, so it reached every mark.
    assert text.count('class="hover"') > 40
    assert not re.search(r'class="hover"><title>', dom)


def test_a_failed_run_alone_still_makes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(DATA / "record_2ranks", tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    summary = json.loads((run / "summary.json").read_text())
    kept = {key: summary[key] for key in ("preset", "num_nodes", "world_size", "micro_batch_per_gpu", "precision")}
    (run / "summary.json").write_text(json.dumps(kept | {"state": "out_of_memory", "error": "too <big>"}))
    monkeypatch.setattr("sys.argv", ["report.py", str(run), "--output", str(tmp_path / "out")])
    report.main()
    text = (tmp_path / "out" / "report.html").read_text()
    assert "no rate was measured (out_of_memory)" in text
    assert "too &lt;big&gt;" in text
    assert "<big>" not in text


def test_method_follows_the_configuration() -> None:
    assert method_of([]).loss == "gather_with_grad"
    config = {"bf16": {"enabled": True}, "clap": {"gradient_sync": "deepspeed", "gradient_bucket_mb": 5.0}}
    found = method_of([config])
    assert (found.overlap, found.gradient_bytes, found.feature_bytes) == (False, 2, 2)
    assert (found.loss, found.bucket_bytes) == ("exact_local", 5e6)
    assert method_of([{"clap": {"loss": {"features": "bf16"}}}]).gradient_bytes == 4


def test_headline_and_gaps_of_two_scales() -> None:
    common = {"model": "micro", "scaling": "weak", "repeats": 2, "state": "completed"}
    rows = [
        Row(1, 4, 10.0, 40.0, scaling_efficiency_percent=100.0, **common),  # type: ignore[arg-type]
        Row(2, 8, 9.0, 72.0, scaling_efficiency_percent=90.0, scaling_efficiency_2sigma_percent=1.5, **common),  # type: ignore[arg-type]
    ]
    runs = [Run("a", "record", "completed"), Run("b", "log", "failed", error="boom")]
    assert "9.000 samples/s/GPU on 8 GPUs (2 nodes), 90.0 ± 1.5 % of the rate per GPU on 4 GPUs" in headline(runs, rows)
    assert "2 runs, at 2 scales" in headline(runs, rows)
    found = gaps(rows, runs)
    assert "b: state failed: boom" in found
    assert any("no spread known at 4, 8 GPUs" in gap for gap in found)
    assert not any("one run only" in gap for gap in found)
    assert by_series(rows) == [rows]
