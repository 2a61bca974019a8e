"""The evaluate command and its options."""

import json
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.model import load_preset
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.clip import SkippedSample
from clap_ds.evaluate import evaluation_settings, parse_arguments, render
from clap_ds.evaluation.metrics import Evaluation, Measure, TaskResult
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import UserError
from tests import processes
from tests.evaluation.conftest import write_clips
from tests.training.training_commands import environment
from tests.weights.fake_checkpoints import checkpoint_of


def settings_of(options: str, run: RunSettings | None = None) -> dict[str, Any]:
    arguments = parse_arguments(["checkpoint", *options.split()])
    return evaluation_settings(arguments, run).model_dump(exclude_unset=True)


def test_options_change_configuration(write_run):
    zero_shot = {"shards": "c.tar", "class_key": "label", "classes": {"a": ["b"], "c": ["d"]}}
    data = {"source": "webdataset", "shards": "train.tar", "tokenizer": "from-data"}
    evaluation = {"zero_shot": zero_shot, "batch_size": 3}
    run = load_run(write_run(clap={"evaluation": evaluation, "data": data}))
    settings = settings_of("--template a_{} --retrieval r.tar --caption_key title", run)
    assert settings["zero_shot"] == {**zero_shot, "templates": ["a_{}"]}
    assert settings["retrieval"] == {"shards": ["r.tar"], "caption_key": "title"}
    assert (settings["tokenizer"], settings["batch_size"]) == ("from-data", 3)


def test_options_without_task_are_refused():
    with pytest.raises(UserError, match="nothing to evaluate"):
        settings_of("")


def test_results_are_json_and_table():
    measures = {
        "retrieval_audio_to_text_r1": Measure(0.25, 0.01, 0.1755, 0.343),
        "retrieval_loss": Measure(2.5, 6.9078, 2.4, 2.6),
    }
    task = TaskResult({"clips": 1234}, measures)
    evaluation = Evaluation({"retrieval": task}, [SkippedSample("a.tar: [0001]", "empty caption")])
    content = evaluation.to_dict()
    assert content["metrics"] == {"retrieval_audio_to_text_r1": 0.25, "retrieval_loss": 2.5}
    assert content["broken_items"] == [{"name": "a.tar: [0001]", "reason": "empty caption"}]
    table = " ".join(render(evaluation, "the title").replace("|", " ").split())
    assert "retrieval (1,234 clips)" in table
    assert "retrieval_audio_to_text_r1 25.00% [17.55, 34.30] 1.00%" in table
    assert "retrieval_loss 2.5000 [2.4000, 2.6000] 6.9078" in table
    assert "empty caption" in table


@pytest.mark.end_to_end
def test_best_checkpoint_is_evaluated_on_two_ranks(clip_tokenizer, tmp_path):
    for step, top1 in ((1, 0.5), (2, 0.25)):
        checkpoint_of(
            ClapModel(load_preset("micro")),
            tmp_path / "run",
            step,
            Path(clip_tokenizer),
            metrics={"zero_shot_top1": top1},
            settings={"clap": {"context_length": 12}},
            best_metric="zero_shot_top1",
        )
    results = tmp_path / "results.json"
    shard = write_clips(tmp_path / "a.tar", range(9))
    options = ["--best", "--retrieval", shard, "--json", str(results)]
    command = ["clap_ds/evaluate.py", tmp_path / "run", *options]
    ranks = processes.ranks(command, 2, env=environment())
    assert [rank.wait() for rank in ranks] == [0, 0]
    output = "".join(rank.stdout for rank in ranks)
    assert ", step 1, zero_shot_top1 0.5: micro on 2 × " in output
    assert ", 12 text tokens" in output
    # Only one rank prints.
    assert output.count("retrieval (9 clips, 14 captions)") == 1
    assert json.loads(results.read_text())["world_size"] == 2
