"""The roofline, worked out by hand for one block. What compiles is tested in tests/model."""

import pytest

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")

from benchmarks.triton_resources import roofline


def test_the_roofline_of_the_first_stage() -> None:
    """616 clips of 64 × 64 tokens, 96 channels and 384 hidden units, in two bytes each."""
    rows = {row["kind"]: row for row in roofline("tiny", 0)}
    tokens, hidden = 616 * 4096 * 96 * 2 / 1e9, 616 * 4096 * 384 * 2 / 1e9
    plain, fused = rows["MLP, torch"], rows["MLP, triton"]
    assert plain["forward_gb"] == pytest.approx(2 * tokens + 4 * hidden)
    assert plain["forward_ms"] == pytest.approx(plain["forward_gb"] / 3.35)
    assert fused["forward_gb"] == pytest.approx(2 * tokens)
    assert fused["backward_gb"] == pytest.approx(5 * tokens + 4 * hidden)
    assert rows["attention, triton"]["forward_gb"] == pytest.approx(4 * tokens)
    assert rows["attention, triton"]["kept_gib"] == pytest.approx(3 * tokens * 1e9 / 2**30)
    assert plain["kept_gib"] - fused["kept_gib"] == pytest.approx(2 * hidden * 1e9 / 2**30)
