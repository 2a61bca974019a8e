"""The chart's bars are the record's ratios."""

from pathlib import Path

from benchmarks.peers_chart import draw, ratios

RECORDS = Path(__file__).resolve().parents[2] / "results" / "cpu" / "peers"


def test_bars_are_ratios_as_published_of_the_faster_mode(tmp_path: Path) -> None:
    found = ratios(RECORDS / "amx_padded.json")["speed.median"].round(2).to_dict()
    assert found == {"clap-ds": 1.0, "transformers": 1.71, "open_clip": 2.15, "LAION-CLAP": 2.22}
    draw([RECORDS / "amx_padded.json", RECORDS / "amx_packed.json"]).save(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000
