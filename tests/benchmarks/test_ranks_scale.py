"""Figures that follow a law are found to follow it, and a call has the collectives and bytes that it has."""

import math

import pytest

from benchmarks.ranks_scale import _rows, fit


@pytest.mark.parametrize(("law", "of"), [("log2 N", math.log2), ("N", float), ("N²", lambda n: n**2)])
def test_the_law_is_found_and_continued(law: str, of: "type[float]") -> None:
    ranks = [8, 16, 32, 64, 128]
    found = fit(ranks, [3 + 0.25 * of(n) for n in ranks])
    expected = {"law": law, "left": 0, "at_512": 3 + 0.25 * of(512), "at_4096": 3 + 0.25 * of(4096)}
    assert found == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items()}
    assert fit(ranks, [-of(n) for n in ranks])["at_4096"] == pytest.approx(-sum(map(of, ranks)) / 5)


@pytest.mark.end_to_end
def test_rows_go_to_rank_0_in_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["call"]: row for row in _rows(3, 1)}
    assert (rows["window: log's rows"]["collectives"], rows["window: log's rows"]["bytes"]) == (1, 104 * 8)
    assert (rows["step: stop.ask"]["collectives"], rows["step: stop.wait"]["collectives"]) == (1, 0)
