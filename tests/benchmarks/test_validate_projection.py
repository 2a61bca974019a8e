"""Foretelling 3 and 4 hosts from 1 and 2, against step times worked out here."""

import json
from math import gamma, sqrt
from pathlib import Path

import pytest

from benchmarks.validate_projection import (
    JOINT_DIM,
    MICRO_BATCH,
    PAYLOAD_SHARE,
    Trial,
    foretell,
    read_trials,
    render,
)
from clap_ds.analysis.runs import InputError

PARAMETERS, RATE_MBIT = 4_000_000, 80.0


def step_s(hosts: int, delay_s: float, sharing_s: float, cores: int) -> float:
    """A step of 1.75 s of compute, bf16 gradients sent after backward; audio features travel under the text tower."""
    bandwidth = RATE_MBIT * 1e6 / 8 * PAYLOAD_SHARE
    reduce = 2 * (hosts - 1) / hosts * 2 * PARAMETERS / bandwidth
    hops = {1: 0, 2: 1, 3: 2, 4: 2}[hosts]
    text_features = (hosts - 1) * (MICRO_BATCH * JOINT_DIM * 2 + 2 * MICRO_BATCH * 4) / bandwidth
    waiting = delay_s * gamma(0.5) * sqrt(hosts)
    return 1.75 + reduce + 2 * hops * 200e-6 + text_features + waiting + sharing_s * (-(-hosts // cores) - 1)


def trial(method: str = "deepspeed", cores: int = 8, delay_s: float = 0.02, sharing_s: float = 0.0) -> Trial:
    times = {hosts: step_s(hosts, delay_s, sharing_s, cores) for hosts in (1, 2, 3, 4)}
    return Trial(method, RATE_MBIT, times, PARAMETERS, 1.5, cores)


def test_foretells_what_follows_the_stated_laws() -> None:
    model, found = foretell(trial())
    assert model.delay_s == pytest.approx(0.02, rel=0.3)
    assert [prediction.hosts for prediction in found] == [3, 4]
    for prediction in found:
        assert prediction.foretold_s == pytest.approx(prediction.measured_s, rel=0.01)
        assert prediction.unchanged_error_percent < -5


def test_ranks_that_share_a_core_take_turns() -> None:
    computed = step_s(1, 0.02, 0, 2) - 1.5
    _, found = foretell(trial(cores=2, sharing_s=computed))
    for prediction in found:
        assert abs(prediction.error_percent) < 1
        assert prediction.foretold_s - prediction.unshared_s == pytest.approx(computed)


def test_nothing_of_three_and_four_hosts_enters_the_fit() -> None:
    first = trial()
    second = Trial(first.method, RATE_MBIT, {**first.step_s, 3: 99.0, 4: 0.1}, PARAMETERS, 1.5, 8)
    (_, before), (_, after) = foretell(first), foretell(second)
    assert [p.foretold_s for p in before] == [p.foretold_s for p in after]
    assert after[0].error_percent < -90


def test_overlap_hides_what_fits_under_backward() -> None:
    _, exposed = foretell(trial())
    _, hidden = foretell(trial("overlapped"))
    assert hidden[1].terms_s["gradient all-reduce"] < exposed[1].terms_s["gradient all-reduce"] / 2


def test_verdict_is_that_of_the_worst() -> None:
    assert "2 of 2 predictions within 15 %" in render([trial()])
    off = Trial("deepspeed", RATE_MBIT, {**trial().step_s, 4: 9.0}, PARAMETERS, 1.5, 8)
    text = render([off])
    assert "1 of 2 predictions within 15 %" in text
    assert "is beyond that goal" in text


def test_one_host_alone_is_refused() -> None:
    with pytest.raises(InputError, match=r"no run on \[2\] hosts"):
        foretell(Trial("deepspeed", 80.0, {1: 1.0, 3: 1.2}, PARAMETERS, 1.5, 8))


def write_run(folder: Path, name: str, hosts: int, step: float, state: str = "completed") -> None:
    run = folder / name
    run.mkdir(parents=True)
    rate = MICRO_BATCH / step
    rates = {"median": rate, "low": rate, "high": rate, "windows": [rate] * 2}
    summary = {"state": state, "num_nodes": hosts, "world_size": hosts, "samples_per_s_per_gpu": rates}
    summary |= {"micro_batch_per_gpu": MICRO_BATCH, "num_parameters": PARAMETERS, "pause_s": 1.5}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "environment.json").write_text(json.dumps({"cpu_count": 2}))


def test_reads_run_directories_and_takes_the_median_of_repeats(tmp_path: Path) -> None:
    for number, (hosts, step) in enumerate([(1, 2.0), (2, 3.0), (2, 5.0), (2, 3.2), (3, 4.0)]):
        write_run(tmp_path / "80mbit", f"overlapped-{number}", hosts, step)
    write_run(tmp_path / "160mbit", "deepspeed-0", 1, 1.9)
    first, second = read_trials(tmp_path)
    assert (first.rate_mbit, first.method, first.step_s) == (160.0, "deepspeed", pytest.approx({1: 1.9}))
    assert (second.method, second.cores) == ("overlapped", 2)
    assert second.step_s == pytest.approx({1: 2.0, 2: 3.2, 3: 4.0})
    assert read_trials(tmp_path, min)[1].step_s == pytest.approx({1: 2.0, 2: 3.0, 3: 4.0})


def test_runs_that_failed_or_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no runs"):
        read_trials(tmp_path)
    write_run(tmp_path / "80mbit", "deepspeed-0", 1, 2.0, state="failed")
    with pytest.raises(InputError, match="state failed"):
        read_trials(tmp_path)
