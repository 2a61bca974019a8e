"""Wilson's interval against published values, and the result as JSON and as a table."""

from __future__ import annotations

import json

import pytest

from clap_ds.data.shard_reader import Broken
from clap_ds.evaluation.report import print_evaluation
from clap_ds.evaluation.result import Evaluation, Measure, TaskResult, wilson


@pytest.mark.parametrize(
    ("proportion", "number", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (81 / 263, 263, 0.2553, 0.3662), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775)],
)
def test_wilson(proportion: float, number: int, low: float, high: float) -> None:
    """81 of 263 is Newcombe's example (Statistics in Medicine 17, 1998)."""
    assert wilson(proportion, number) == pytest.approx((low, high), abs=5e-5)


@pytest.fixture
def evaluation() -> Evaluation:
    retrieval = {"retrieval_audio_to_text_r1": Measure.of_mean(0.25, 0.01, 100)}
    zero_shot = {"zero_shot_map": Measure(0.5, 0.2, 0.4, 0.6)}
    return Evaluation(
        {
            "retrieval": TaskResult({"clips": 1234, "captions": 5678}, retrieval),
            "zero_shot": TaskResult({"clips": 99, "classes": 7}, zero_shot),
        },
        [Broken("a.tar: [0001]", "empty caption")],
    )


def test_as_json(evaluation: Evaluation) -> None:
    content = json.loads(json.dumps(evaluation.to_dict()))
    assert content["metrics"] == {"retrieval_audio_to_text_r1": 0.25, "zero_shot_map": 0.5}
    assert content["tasks"]["zero_shot"]["counts"] == {"clips": 99, "classes": 7}
    assert content["tasks"]["zero_shot"]["measures"]["zero_shot_map"]["chance"] == 0.2
    assert content["broken_items"] == [{"name": "a.tar: [0001]", "reason": "empty caption"}]


def test_the_table(evaluation: Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    print_evaluation(evaluation, "the title")
    shown = capsys.readouterr().out
    assert "the title" in shown
    assert "retrieval (1,234 clips, 5,678 captions)" in shown
    row = next(line for line in shown.splitlines() if "audio to text R@1" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "audio to text R@1", "25.00 %", "[17.55, 34.30]", "1.00 %"
    ]  # fmt: skip
    assert "mean average precision" in shown
    assert "1 broken and left out, the first: a.tar: [0001]: empty caption" in shown
