"""Test the evaluate command and its options."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.model import load_preset
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.clip import Broken
from clap_ds.evaluate import evaluation_settings, parse_arguments, render
from clap_ds.evaluation.metrics import Evaluation, Measure, TaskResult
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import UserError
from tests import processes
from tests.evaluation.conftest import WriteClips
from tests.training.training_commands import environment
from tests.weights.fake_checkpoints import checkpoint_of, save_safetensors


def settings_of(options: str, run: RunSettings | None = None) -> dict[str, Any]:
    return evaluation_settings(parse_arguments(["checkpoint", *options.split()]), run).model_dump(
        exclude_unset=True
    )


def test_options_say_what_to_evaluate_or_change_what_the_configuration_says(
    write_run: Callable[..., Path],
) -> None:
    retrieval = settings_of("--retrieval a.tar b.tar --caption_key title")["retrieval"]
    assert retrieval == {"shards": ["a.tar", "b.tar"], "caption_key": "title"}
    alone = settings_of(
        "--zero_shot c.tar --class_key label --template {}! --num_workers 2 --batch_size 5"
    )
    zero_shot: dict[str, Any] = {"shards": ["c.tar"], "class_key": "label", "templates": ["{}!"]}
    assert alone == {
        "retrieval": None, "zero_shot": zero_shot, "num_workers": 2, "batch_size": 5, "tokenizer": None,
    }  # fmt: skip
    zero_shot = {"shards": "c.tar", "class_key": "label", "classes": {"a": ["b"], "c": ["d"]}}
    data = {"source": "webdataset", "shards": "train.tar", "tokenizer": "from-data"}
    run = load_run(
        write_run(clap={"evaluation": {"zero_shot": zero_shot, "batch_size": 3}, "data": data})
    )
    settings = settings_of("--template a_{} --retrieval r.tar", run)
    assert settings["zero_shot"] == {**zero_shot, "templates": ["a_{}"]}
    assert settings["retrieval"] == {"shards": ["r.tar"]}
    assert (settings["tokenizer"], settings["batch_size"]) == ("from-data", 3)
    with pytest.raises(UserError, match="nothing to evaluate"):
        settings_of("")


def test_json_and_table() -> None:
    retrieval = {"retrieval_audio_to_text_r1": Measure(0.25, 0.01, 0.1755, 0.343)}
    retrieval["retrieval_loss"] = Measure(2.5, 6.9078, 2.4, 2.6)
    tasks = {"retrieval": TaskResult({"clips": 1234, "captions": 5678}, retrieval)}
    evaluation = Evaluation(tasks, [Broken("a.tar: [0001]", "empty caption")])
    content = json.loads(json.dumps(evaluation.to_dict()))
    assert content["metrics"] == {"retrieval_audio_to_text_r1": 0.25, "retrieval_loss": 2.5}
    assert content["tasks"]["retrieval"]["counts"] == {"clips": 1234, "captions": 5678}
    assert content["broken_items"] == [{"name": "a.tar: [0001]", "reason": "empty caption"}]
    shown = " ".join(render(evaluation, "the title").replace("|", " ").split())
    for part in (
        "the title",
        "1,234 clips",
        "retrieval_audio_to_text_r1 25.00% [17.55, 34.30] 1.00%",
        "2.5000",
        "empty caption",
    ):
        assert part in shown


def on_ranks(world_size: int, *options: str | Path) -> tuple[list[int], str, str]:
    """Run the command on ranks, and return their exit codes and output."""
    ranks = processes.ranks(["clap_ds/evaluate.py", *options], world_size, env=environment())
    codes = [rank.wait() for rank in ranks]
    return codes, "".join(rank.stdout for rank in ranks), "".join(rank.stderr for rank in ranks)


@pytest.mark.end_to_end
def test_the_best_checkpoint_on_two_ranks(
    write_clips: WriteClips, clip_tokenizer: str, tmp_path: Path
) -> None:
    told: dict[str, Any] = {
        "settings": {"clap": {"context_length": 12}},
        "best_metric": "zero_shot_top1",
    }
    for step, top1 in ((1, 0.5), (2, 0.25)):
        model = ClapModel(load_preset("micro"))
        metrics = {"zero_shot_top1": top1}
        checkpoint_of(model, tmp_path / "run", step, Path(clip_tokenizer), metrics=metrics, **told)
    options = ["--best", "--retrieval", *write_clips(5, 4), "--json", str(tmp_path / "found.json")]
    codes, output, errors = on_ranks(2, tmp_path / "run", *options)
    assert codes == [0, 0], errors
    assert ", step 1, zero_shot_top1 0.5: micro on 2 × " in output
    assert ", 12 text tokens" in output
    assert (
        output.count(" retrieval_audio_to_text_r1 ")
        == output.count("retrieval (9 clips, 14 captions)")
        == 1
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["world_size"], found["model"], found["num_broken_items"]) == (2, "micro", 0)


@pytest.mark.end_to_end
def test_a_mistake_is_one_message(tmp_path: Path, clip_tokenizer: str) -> None:
    save_safetensors(ClapModel(load_preset("micro")), checkpoint := tmp_path / "micro.safetensors")
    codes, _, errors = on_ranks(
        1, checkpoint, "--retrieval", "nowhere-*.tar", "--tokenizer", clip_tokenizer
    )
    assert codes == [2], errors
    assert "retrieval.shards: no file matches" in errors
    assert "Traceback" not in errors
    settings = {"clap": {"loss": {"kind": "another"}}}
    run = checkpoint_of(
        ClapModel(load_preset("micro")), tmp_path, 1, Path(clip_tokenizer), settings=settings
    )
    codes, _, errors = on_ranks(1, run, "--retrieval", "nowhere-*.tar")
    assert codes == [2], errors
    assert "trained with the loss 'another'; this version has softmax, sigmoid" in errors
