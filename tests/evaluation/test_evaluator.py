"""The evaluator is independent of the number of ranks, leaves the model unchanged, and detects
mistakes early."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clap_ds.config.model import load_preset
from clap_ds.config.schema import RETRIEVAL, RETRIEVAL_LOSS, ZERO_SHOT, EvaluationSettings
from clap_ds.data.shard_manifest import ShardManifest, front_end_of, write_manifest
from clap_ds.distributed.init import Ranks
from clap_ds.engine.engine import NonFiniteError
from clap_ds.evaluation import ranking
from clap_ds.evaluation.evaluator import Evaluator
from clap_ds.model.clap import ClapModel
from clap_ds.model.mel import LogMel
from clap_ds.utils.errors import CollectiveUserError
from clap_ds.weights.hub import load_tokenizer, tokenize
from tests.data.tars import write_tar
from tests.evaluation.conftest import (
    ALONE,
    KINDS,
    Members,
    clip_members,
    current_ranks,
    description,
    members_of,
    npy,
    run_on_ranks,
    tone,
    write_clips,
)

MODEL = load_preset("micro")
MICRO = MODEL.model_copy(update={"audio": MODEL.audio.model_copy(update={"num_samples": 4800})})


def micro_model() -> ClapModel:
    """Build a model with larger text weights, because in a fresh tower captions differ only by
    rounding."""
    torch.manual_seed(0)
    model = ClapModel(MICRO, text_dropout=0.5)
    with torch.no_grad():
        for parameter in model.text.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def settings_for(shards: list[str], **zero_shot: Any) -> EvaluationSettings:
    both = {"retrieval": {"shards": shards}, "zero_shot": {"shards": shards, **zero_shot}}
    return EvaluationSettings.model_validate(both)


def build(settings: EvaluationSettings, tokenizer: str | None, ranks: Ranks = ALONE) -> Evaluator:
    return Evaluator(
        settings,
        model_config=MICRO,
        tokenizer_name=tokenizer,
        context_length=16,
        micro_batch=4,
        loss_kind="softmax",
        ranks=ranks,
    )


def evaluate_on_rank(shards: list[str], tokenizer: str) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        # So that every rank has some queries.
        patch.setattr(ranking, "SCORES_HELD", 8)
        evaluator = build(settings_for(shards), tokenizer, current_ranks())
        return evaluator.evaluate(micro_model()).metrics


def test_metrics_are_independent_of_number_of_ranks(eight_processes, tmp_path, clip_tokenizer):
    shards = [write_clips(tmp_path / "0.tar", range(4))]
    shards.append(write_clips(tmp_path / "1.tar", range(4, 9)))
    expected = build(settings_for(shards), clip_tokenizer).evaluate(micro_model()).metrics
    assert {*expected} == {*RETRIEVAL, *ZERO_SHOT}
    arguments = (evaluate_on_rank, shards, clip_tokenizer)
    by_rank = run_on_ranks(eight_processes, 2, tmp_path, *arguments)
    loss = expected.pop(RETRIEVAL_LOSS)
    for metrics in by_rank:
        # Other micro-batches are rounded differently, which ranks must not affect.
        assert metrics.pop(RETRIEVAL_LOSS) == pytest.approx(loss, rel=1e-5)
        assert metrics == expected


def test_evaluation_that_cannot_be_compiled_runs_uncompiled(tmp_path, clip_tokenizer, capsys):
    def fail_to_compile(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    model = micro_model()
    shards = [write_clips(tmp_path / "0.tar", range(4))]
    evaluator = build(settings_for(shards), clip_tokenizer)
    engine: Any = SimpleNamespace(model=model, ema=None, broadcast_bn_statistics=lambda: None)
    expected = evaluator.evaluate_engine(engine).metrics
    model.audio.compile(backend=fail_to_compile)
    random_state = torch.get_rng_state()
    assert "no such instruction" in str(evaluator.try_compiled(model))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert "run slower: rank 0: " in capsys.readouterr().out
    assert evaluator.evaluate_engine(engine).metrics == expected


@torch.no_grad()
def test_metrics_equal_the_models_features(tmp_path, clip_tokenizer):
    model = micro_model()
    settings = settings_for([write_clips(tmp_path / "a.tar", range(9))], templates=["{}", "a {}"])
    metrics = build(settings, clip_tokenizer).evaluate(model).metrics
    model.eval()
    audio = model.encode_audio(torch.stack([torch.from_numpy(tone(number)) for number in range(9)]))
    tokenizer = load_tokenizer(clip_tokenizer, vocab_size=512)

    def embed(captions: list[str]) -> torch.Tensor:
        return model.encode_text(*tokenize(captions, tokenizer, 16))

    # A class's features are the mean of its captions'.
    class_means = [embed([kind, f"a {kind}"]).mean(0) for kind in KINDS]
    classes = F.normalize(torch.stack(class_means), dim=-1)
    is_hit = (audio @ classes.T).argmax(1) == torch.arange(9) % 3
    assert metrics["zero_shot_top1"] == pytest.approx(float(is_hit.float().mean()))

    # The loss is of first captions.
    text = embed([description(number)["caption"][0] for number in range(9)])
    logits = model.logit_scale.exp() * audio @ text.T
    labels = torch.arange(9)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    assert metrics[RETRIEVAL_LOSS] == pytest.approx(float(loss), rel=1e-4)


def test_features_are_evaluated_like_their_audio(tmp_path, clip_tokenizer):
    members = []
    for number in range(5):
        features = LogMel(MICRO.audio)(torch.from_numpy(tone(number))[None])[0]
        _, text = clip_members(number, description(number))
        members += [(f"{number:04d}.npy", npy(features.half().numpy())), text]
    (tmp_path / "mel").mkdir()
    write_manifest(tmp_path / "mel", ShardManifest({}, "mel", front_end_of(MICRO.audio)))
    mel = [str(write_tar(tmp_path / "mel" / "a.tar", members))]
    expected, metrics = (
        build(settings_for(shards), clip_tokenizer).evaluate(micro_model()).metrics
        for shards in ([write_clips(tmp_path / "a.tar", range(5))], mel)
    )
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_evaluation_leaves_model_and_random_state(tmp_path, clip_tokenizer):
    model = micro_model().train()
    model.text.eval()
    evaluator = build(settings_for([write_clips(tmp_path / "a.tar", range(5))]), clip_tokenizer)

    def read_state() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            [tensor.tolist() for tensor in model.state_dict().values()],
            torch.get_rng_state().tolist(),
        ]

    state = read_state()
    evaluator.evaluate(model)
    assert read_state() == state
    with torch.no_grad():
        model.audio_projection.linear1.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="has diverged"):
        evaluator.evaluate(model)


def test_broken_clips_are_counted_and_named(tmp_path, clip_tokenizer, capfd):
    extra = [("1000.wav", b"RIFF nothing"), ("1000.json", b'{"kind": "hum", "caption": "x"}')]
    extra += clip_members(1001, {"kind": "hum", "caption": " "})
    extra += clip_members(1002, {"caption": "no class"})
    evaluator = build(
        settings_for([write_clips(tmp_path / "a.tar", range(4), extra)]), clip_tokenizer
    )
    for _ in range(2):
        evaluation = evaluator.evaluate(micro_model())
    assert evaluation.tasks["retrieval"].counts == {"clips": 5, "captions": 7}
    assert evaluation.tasks["zero_shot"].counts == {"clips": 5, "classes": 3}
    assert [broken.name[-4:] for broken in evaluation.broken] == ["1001", "1002", "1000"]
    assert evaluation.to_dict()["num_broken_items"] == 3
    # The second evaluation prints nothing again.
    assert capfd.readouterr().err.count("skipped") == 3


def build_on_rank(shards_by_rank: list[list[str]], tokenizer: str) -> str:
    """Return the error of building on shards that differ between ranks."""
    ranks = current_ranks()
    with pytest.raises(CollectiveUserError) as refusal:
        build(settings_for(shards_by_rank[ranks.rank]), tokenizer, ranks)
    return str(refusal.value)


def test_ranks_with_different_shards_are_refused(eight_processes, tmp_path, clip_tokenizer):
    shards_by_rank = [[write_clips(tmp_path / f"{rank}.tar", range(3))] for rank in range(2)]
    arguments = (build_on_rank, shards_by_rank, clip_tokenizer)
    for message in run_on_ranks(eight_processes, 2, tmp_path, *arguments):
        assert "different shards" in message


UNDECODABLE: Members = [("a.wav", b"RIFF"), ("a.txt", b"a caption")]
FOUR = members_of(range(4))


@pytest.mark.parametrize(
    ("task", "members", "changes", "message"),
    [
        ("retrieval", UNDECODABLE, {}, "retrieval.shards: none .* can be decoded"),
        ("retrieval", FOUR, {"caption_key": "title"}, "retrieval.shards: expected clips with capt"),
        ("zero_shot", FOUR[:2], {}, "zero_shot.classes: expected at least 2 classes"),
        ("zero_shot", FOUR, {"classes": {"hum": ["x"]}}, "zero_shot.classes: .* 'click'"),
    ],
)
def test_mistake_in_settings_names_field(tmp_path, clip_tokenizer, task, members, changes, message):
    section = {"shards": str(write_tar(tmp_path / "a.tar", members)), **changes}
    settings = EvaluationSettings.model_validate({task: section})
    with pytest.raises((CollectiveUserError, ValueError), match=rf"^clap\.evaluation\.{message}"):
        build(settings, clip_tokenizer).evaluate(micro_model())


def test_missing_tokenizer_and_unknown_loss_are_named(tmp_path, clip_tokenizer):
    settings = settings_for([write_clips(tmp_path / "a.tar", range(4))])
    with pytest.raises(CollectiveUserError, match=r"^clap\.evaluation\.tokenizer: missing"):
        build(settings, None)
    with pytest.raises(CollectiveUserError, match="'another'; this version has softmax, sigmoid"):
        replace(build(settings, clip_tokenizer), loss_kind="another")
