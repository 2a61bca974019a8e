"""Figures that README and docs/ quote from a record in results/ are the record's.

A figure is quoted as the text of a link to its record: `[1.85 times](results/cpu/peers/avx512_packed.md)`. `RECORDED` says
where in the record's data it stands. A link with a figure that isn't there fails the test, as does one whose figure is another.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from clap_ds.record.terminal import rows, title

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
QUOTE = re.compile(r"(?<!!)\[([^\]\[]*\d[^\]\[]*)\]\((?:\.\./)?(results/[^)#]+)\)")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?")


def _peers(of: str, *against: str) -> Callable[[], list[float]]:
    (record,) = _json(f"cpu/peers/{of}.json")
    ratios = {"transformers": record["speed_ratio"]["step"]} | record.get("step_ratio", {})
    return lambda: [ratios[name]["median"] for name in against]


def _json(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def _exposed(compute: str) -> list[float]:
    """Least and most per cent of DeepSpeed's exposed time that stays exposed when overlapped, over link rates."""
    rows = [row for row in _json("cpu/communication/communication.json") if row["compute"] == compute]
    shares = [100 * row["overlapped"]["exposed_s"] / row["deepspeed"]["exposed_s"] for row in rows]
    return [min(shares), max(shares)]


def _loss(loss: str) -> list[float]:
    """MB of one rank at the largest global batch."""
    return [_json("cpu/loss/loss.json")[-1][loss]["peak_bytes"] / 1e6]


def _traced(loss: str) -> dict[str, float]:
    return next(row for row in _json("cpu/loss/trace.json") if (row["ranks"], row["method"]) == (512, loss))


def _log_speed() -> list[float]:
    """GB, least and most seconds of plain logs, and seconds of gzip's."""
    logs = {log["kind"]: log for log in _json("cpu/log_speed/log_speed.json")["logs"]}
    plain = [log["seconds"] for kind, log in logs.items() if "gzip" not in kind]
    zipped = [log["seconds"] for kind, log in logs.items() if "gzip" in kind]
    return [logs["with the breakdown"]["gb"], min(plain), max(plain), *zipped]


def _validation() -> list[float]:
    rows = _json("plan/validation.json")
    rates = [(row["predicted_rate"]["low"], row["rate"], row["predicted_rate"]["high"]) for row in rows]
    ratios = [row["ratio"] for row in rows]
    within = sum(0.67 <= ratio <= 1.5 for ratio in ratios)
    return [median(ratios), len(rows), within, 0.67, 1.5, sum(low <= rate <= high for low, rate, high in rates)]


def _validated(model: str) -> list[dict[str, Any]]:
    return [row for row in _json("plan/validation.json") if row["device"] == "gh200" and row["model"].startswith(model)]


def _laions(*names: str) -> Callable[[], list[float]]:
    """Of LAION's runs, tiny and base, each named figure in turn."""
    rows = [_validated(f"htsat_{size}")[0] for size in ("tiny", "base")]
    for row in rows:
        row["unexplained_ms"] = row["published_ms"] - row["predicted_ms"]
        row["gap_ms"] = row["unexplained_ms"] + row["copies_ms"]
    return lambda: [row[name] for name in names for row in rows]


def _predicted(scale: int, *runs: str) -> list[float]:
    """Samples/s a GPU, the middle, of runs at the first or the last scale."""
    scales = (_json("plan/predictions.json")[run]["scales"] for run in runs)
    return [each[scale]["samples_per_s_per_gpu"]["middle"] for each in scales]


def _embedding(way: str) -> list[float]:
    return [row["ratio"] for row in _json("cpu/embed_speed/embed_speed.json")["rows"] if row["name"] == way]


RECORDED: dict[tuple[str, str], Callable[[], list[float]]] = {
    ("cpu/communication/communication.md", "10–16 % stays exposed"): lambda: _exposed("emulated"),
    ("cpu/communication/communication.md", "76–82 %"): lambda: _exposed("real"),
    ("cpu/embed_speed/embed_speed.md", "1.18 times"): lambda: _embedding("clap-embed"),
    ("cpu/embed_speed/embed_speed.md", "7.09 times"): lambda: _embedding("clap-embed --precision bf16"),
    ("cpu/log_speed/log_speed.md", "1 GB in 8–11 s, of gzip in 15"): _log_speed,
    ("cpu/loss/loss.md", "43 MB"): lambda: _loss("exact_local"),
    ("cpu/loss/loss.md", "4.7 GB"): lambda: [_loss("gather_with_gradient")[0] / 1e3],
    ("cpu/loss/trace.md", "156 kernels and 9.9 GB"): lambda: [
        _traced("exact_local")[n] for n in ("kernels", "gigabytes")
    ],
    ("cpu/loss/trace.md", "30 GB"): lambda: [_traced("gather_with_gradient")["gigabytes"]],
    ("cpu/peers/peers.md", "1.7 times as fast"): _peers("kept", "transformers"),
    ("cpu/peers/peers.md", "2.2 times"): _peers("packed", "transformers"),
    ("cpu/peers/avx512_padded.md", "1.36 times"): _peers("avx512_padded", "transformers"),
    ("cpu/peers/avx512_packed.md", "1.85 times"): _peers("avx512_packed", "transformers"),
    ("cpu/peers/avx512_padded.md", "1.54 and 1.61 times"): _peers(
        "avx512_padded", "open_clip's loop", "LAION-CLAP's loop"
    ),
    ("cpu/peers/avx512_packed.md", "2.12 and 2.23"): _peers("avx512_packed", "open_clip's loop", "LAION-CLAP's loop"),
    (
        "plan/validation.md",
        "the median of predicted over published is 1.08 of 25 rows; 25 are between 0.67 and 1.5, 22 within their interval",
    ): _validation,
    ("cpu/train_demo_seeds/seeds.md", "91.2 to 94.4 %"): lambda: [
        100 * of(_json("cpu/train_demo_seeds/seeds.json")["zero_shot_top1"].values()) for of in (min, max)
    ],
    (
        "plan/predictions.md",
        "2,721 samples/s a GPU for HTSAT-tiny on an H100, 1,772 for HTSAT-base, 2,016 and 1,341 at 512 GPUs",
    ): lambda: [
        *_predicted(0, "htsat_tiny h100-sxm", "htsat_base h100-sxm"),
        *_predicted(1, "htsat_tiny h100-sxm", "htsat_base h100-sxm"),
        512,
    ],
    ("plan/validation.md", "predicted at 1.24 and 1.20 times the 623.7 and 538.2 samples/s"): _laions("ratio", "rate"),
    (
        "plan/validation.md",
        "2,464 and 1,664 times a step, 1.26 and 0.85 GB a sample",
    ): _laions("copies", "copies_gb_a_sample"),
    ("plan/validation.md", "0.38 and 0.26 ms of the 0.69 and 0.57 ms a sample"): _laions("copies_ms", "gap_ms"),
    ("plan/validation.md", "0.31 ms in both"): lambda: [_laions("unexplained_ms")()[0]],
    ("plan/validation.md", "BERT on that GPU within 21 %"): lambda: [
        max(abs(100 * (row["ratio"] - 1)) for row in _validated("BERT"))
    ],
}
"""By record and quoted text, the values in the order they are quoted."""
FOUND = [
    (page, record.removeprefix("results/"), " ".join(text.split()))
    for page in PAGES
    for text, record in QUOTE.findall((ROOT / page).read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "record", "text"), FOUND)
def test_a_quoted_figure_is_the_records(page: str, record: str, text: str) -> None:
    assert (record, text) in RECORDED, f"{page}: say in RECORDED where {text!r} stands in the data of results/{record}"
    quoted, recorded = NUMBER.findall(text), RECORDED[record, text]()
    rounded = [f"{value:,.{len(shown.partition('.')[2])}f}" for shown, value in zip(quoted, recorded, strict=True)]
    assert quoted == rounded, f"{page}: {text!r}, recorded {recorded}"


def test_each_recorded_figure_is_quoted() -> None:
    assert {(record, text) for _, record, text in FOUND} == set(RECORDED)


def test_readmes_table_is_what_its_run_printed() -> None:
    page, summary = (ROOT / "README.md").read_text(encoding="utf-8"), _json("cpu/htsat_tiny_cpu/summary.json")
    shown = re.findall(r"^│ (.+?) +│ +(.+?) │$", page, re.MULTILINE)
    printed = {name.strip(): " ".join(value.split()) for name, value in rows(summary)}
    assert shown
    assert {name.strip(): " ".join(value.split()) for name, value in shown}.items() <= printed.items()
    assert title(summary) in page
