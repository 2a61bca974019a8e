"""The chart's bars are the record's ratios."""

import json
from pathlib import Path

from benchmarks.peers_chart import draw, ratios

RECORDS = Path(__file__).resolve().parents[2] / "results" / "cpu" / "peers"


def test_bars_are_ratios_as_published_of_the_faster_mode(tmp_path: Path) -> None:
    found = ratios(json.loads((RECORDS / "amx_padded.json").read_text()))
    shown = {name: round(speed["median"], 2) for name, speed in found.items()}
    assert shown == {"ours": 1.0, "transformers": 1.71, "open_clip": 2.15, "LAION-CLAP": 2.22}
    draw([RECORDS / "amx_padded.json", RECORDS / "amx_packed.json"]).save(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000
