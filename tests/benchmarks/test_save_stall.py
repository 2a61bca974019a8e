"""What a run's history says of its checkpoints, of one made up."""

import pytest

from benchmarks import save_stall


def history(*, behind: bool) -> save_stall.Lines:
    """Three checkpoints, after each fourth step: steps take 2 s, and 4 s while one is written, which two steps take; training
    stands still for 0.5 s, or until one is written."""
    lines, now_s = save_stall.Lines(), 100.0
    for step in range(1, 13):
        time_s = 4.0 if behind and step > 4 and step % 4 in (1, 2) else 2.0
        now_s += time_s
        lines.append({"phase": "train", "step": step, "time_s": time_s, "train_s": now_s, "memory_bytes": 10**9 * step})
        saved = step if not behind or step == 12 else step - 2
        if saved % 4 == 0 and saved:
            lines.append({"phase": "checkpoint", "step": saved, "seconds": 9.0, "train_s": now_s + 0.01})
        if step % 4 == 0:
            now_s += 0.5 if behind else 10.0
    return lines


@pytest.mark.parametrize(("behind", "stall_s"), [(True, 0.5), (False, 10.0)])
def test_what_stood_still_and_the_rate_meanwhile(behind: bool, stall_s: float) -> None:
    row = save_stall.row("", [history(behind=behind)] * 2)
    medians = {name: found.median for name, found in row.items() if hasattr(found, "median")}
    assert medians == pytest.approx(
        {"stall_s": stall_s, "written_s": 9, "free_s": 2} | ({"rate": 0.5} if behind else {})
    )
    assert (row["saves"], row["memory_peak_bytes"]) == (4, 12 * 10**9)
