"""What programs other than DeepSpeed print: open_clip, LAION-CLAP, any that the table is given."""

import re
from pathlib import Path
from statistics import fmean

import pytest

from clap_ds.analysis.dialects import DIALECTS, Dialect
from clap_ds.analysis.runs import read_runs
from tests.analysis.samples import given, write

OPEN_CLIP = (
    "2026-11-20,12:03:13 | INFO | Train Epoch: {} [{:>6}/{} ({:.0f}%)] {}Data (t): 0.01 Batch (t): {:.3f}{} LR: 3e-4 "
)
PARAMETERS = "".join(
    f"2026-11-20,12:00:00 | INFO |   {line}\n"
    for line in ("batch_size: 616", "world_size: 8", "accum_freq: 1", "model: HTSAT-tiny-Roberta-base")
)


@pytest.mark.parametrize("form", ["open_clip", "open_clip before it told a GPU's rate", "LAION-CLAP"])
def test_open_clips_and_laion_claps_training_logs_are_read(tmp_path: Path, form: str) -> None:
    """Two epochs of 1,000 steps of 8 × 616 samples, a line after step 1, 101, 201 …; every tenth step is slower by a second.
    Rates are of the last step alone, which is one of the quick."""
    batch, since, text = 8 * 616, [], PARAMETERS
    for step in range(2000):
        since.append(2.0 if step % 10 == 9 else 1.0)
        done = step % 1000 + 1
        if step % 1000 % 100 == 0 or done == 1000:
            told = [f", {batch / since[-1]:#g}/s", f", {batch / since[-1]:#g}/s, {616 / since[-1]:#g}/s/gpu"]
            rate, loss = ("", "Loss: 5.1 (5.1) ") if form == "LAION-CLAP" else (told[form == "open_clip"], "")
            values = (step // 1000, done * batch, 1000 * batch, done / 10, loss, fmean(since), rate)
            text += OPEN_CLIP.format(*values) + "Logit Scale: 14.286\n"
            since = []
    (run,) = read_runs([write(tmp_path / "n2.log", text)], given(gpus=8, nodes=2))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (2, 8, 616)
    assert run.model == "htsat_tiny_roberta_base"
    # From step 101 to 1,000, step 1,001, and to 2,000: its rate is that of the mean step, 1.1 s.
    assert run.rate == pytest.approx(616 / 1.1, rel=1e-3)
    assert (run.engine_samples_per_s_per_gpu, run.notes) == (None, "")
    (run,) = read_runs([write(tmp_path / "cut.log", text[len(PARAMETERS) :])], given(gpus=8, nodes=2))
    assert (run.rate, run.notes) == (None, "no rate, as the log doesn't state its batch")


def test_another_programs_lines_are_one_entry_in_the_table_of_dialects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = rb"iteration +(?P<step>\d+)/.* time \(ms\): (?P<step_ms>[\d.]+) .* batch size: +(?P<global_batch>\d+)"
    monkeypatch.setitem(DIALECTS, "another", Dialect(b"iteration ", re.compile(numbers)))
    text = " iteration {:8d}/ 1000 | time (ms): {:.1f} | global batch size: {:5d} |\n"
    lines = (text.format(step, 900 if step == 10 else 250, 64) for step in range(10, 110, 10))
    (run,) = read_runs([write(tmp_path / "m.log", "".join(lines))], given(nodes=1, gpus=4))
    assert (run.rate, run.batch_per_gpu, len(run.windows)) == (pytest.approx(64), 16, 9)
