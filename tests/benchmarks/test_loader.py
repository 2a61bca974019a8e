"""The loader's benchmark on shards of its own making, small: what it starts and what it asks of it."""

from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import loader
from tests.data.tars import marked_item, marked_tars


@pytest.mark.end_to_end
def test_a_child_loads_and_says_what_it_did(tmp_path: Path, tokenizer_dir: str) -> None:
    marked_tars(tmp_path, 2, 40)
    config = loader.write_config(tmp_path, tmp_path, Path(tokenizer_dir), 8)
    content = (
        config.read_text().replace("htsat_tiny_roberta_base", "micro").replace('"text_tokens": 77', '"text_tokens": 12')
    )
    config.write_text(content)
    with closing(loader.Child(loader.PACKAGE.parent, config, 2)) as child:
        loaded = child(0.2)
    assert loaded["per_s"] > 0
    assert loaded["mb_per_s"] == pytest.approx(loaded["per_s"] * len(marked_item(0)[0][1]) / 1e6, rel=0.5)


def test_a_row_is_made_of_medians_and_of_ratios_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"before": [1.0, 10.0, 20.0, 100.0], "now": [1.0, 30.0, 40.0, 500.0], "worker": [1.0, 33.0, 33.0, 33.0]}

    class Child:
        def __init__(self, checkout: Path, config: Path, workers: int, core: int | None = None) -> None:
            self.rates = iter(rates["worker" if workers else "now" if checkout == loader.PACKAGE.parent else "before"])

        def __call__(self, seconds: float) -> dict[str, float]:
            per_s = next(self.rates)
            return {"per_s": per_s, "mb_per_s": 1.5 * per_s}

        def close(self) -> None:
            pass

    monkeypatch.setattr(loader, "Child", Child)
    row = loader.measure("WAV", Path("run.json"), Path("other"), 1.0, 3)
    assert (row["before"], row["now"], row["worker"]) == (20.0, 40.0, 33.0)
    assert (row["ratio"], row["low"], row["high"], row["kb"]) == (3.0, 2.0, 5.0, 1500.0)
    assert row["workers"] == pytest.approx(1.25 * 3300 / 33)
