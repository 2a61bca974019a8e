"""The command: what it prints, that its numbers hang together, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds import plan
from clap_ds.config.errors import UserError

WriteRun = Callable[..., Path]


def _report(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    plan.main(["--deepspeed_config", str(path), "--gpu", "h100-sxm", "--json", *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_hangs_together(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "4", "1", "--gpus_per_node", "2", "--find_micro_batch", "--samples", "1e6"]
    options += ["--price_per_gpu_hour", "2", "--currency", "EUR", "--price_source", "a list"]
    report = _report(write_run(), capsys, *options)
    assert report["predicted"] is report["fits"] is True
    assert report["peak_memory_gib"] == pytest.approx(sum(report["memory_gib"].values()))
    rates = report["samples_per_s_per_gpu"]
    assert rates["low"] < rates["middle"] < rates["high"]
    assert rates["middle"] == pytest.approx(4 / report["step_s"]["step"]["middle"])
    first, last = report["scales"]
    assert (first["nodes"], first["gpus"], first["efficiency_percent"]) == (1, 2, 100)
    assert (last["nodes"], last["gpus"]) == (4, 8)
    assert 0 < last["efficiency_percent"] < 100
    assert last["gpu_hours"] == pytest.approx(1e6 / last["samples_per_s_per_gpu"]["middle"] / 3600)
    assert last["money"] == pytest.approx(2 * last["gpu_hours"])
    assert report["price"] == "At 2 EUR for a GPU-hour; source: a list."
    assert report["largest_micro_batch"] % 8 == 0
    own = [each for each in report["variants"] if (each["attention"], each["compile"]) == ("sdpa", "off")]
    assert own[0]["samples_per_s_per_gpu"] == rates


def test_what_is_printed_names_itself_a_prediction(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "gh200", "--text_tokens", "8", "--micro_batch", "16", "--audio", "mel"]
    plan.main(["--deepspeed_config", str(write_run()), *options])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "## Predicted, nothing measured: micro on gh200, bf16, micro-batch 16, 8 text tokens, padded,"
        " fed log-mel features"
    )
    assert "**fits**" in printed
    assert "Assumed:" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h100-sxn"], "did you mean 'h100-sxm'"),
        (["--gpu", "h200", "--text_tokens", "100"], "--text_tokens 100: micro has positions for 64"),
    ],
)
def test_mistakes_are_said(write_run: WriteRun, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan.main(["--deepspeed_config", str(write_run()), *options])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "1000000"], "up to 65,536 GPUs, found 4,000,000"),
        (["--price_per_gpu_hour", "2"], "needs --samples"),
        (["--text_tokens", "514"], "has positions for 512"),
    ],
)
def test_what_cannot_be_planned_is_said_at_once(options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan.main(["--deepspeed_config", "htsat_tiny", "--gpu", "h100-sxm", *options])
