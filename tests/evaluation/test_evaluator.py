"""Test the evaluator: independent of the number of ranks, leaves the model unchanged, detects
mistakes early."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clap_ds.config.model import load_preset
from clap_ds.config.schema import LOSS, EvaluationSettings
from clap_ds.data.shard_manifest import ShardManifest, ShardRecord, front_end_of, write_manifest
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
    WriteClips,
    clip_members,
    description,
    npy,
    on_ranks,
    ranks_here,
    tone,
)
from tests.rank_pool import RankPool

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


def make(settings: EvaluationSettings, tokenizer: str | None, ranks: Ranks = ALONE) -> Evaluator:
    sizes: Any = {
        "model_config": MICRO,
        "context_length": 16,
        "micro_batch": 4,
        "loss_kind": "softmax",
    }
    return Evaluator(settings, **sizes, tokenizer_name=tokenizer, ranks=ranks)


def metrics_on_ranks(shards: list[str], tokenizer: str) -> dict[str, float]:
    with mock.patch.object(ranking, "SCORES_HELD", 8):  # so that every rank has some
        return make(settings_for(shards), tokenizer, ranks_here()).evaluate(micro_model()).metrics


@pytest.mark.parametrize(("world_size", "sizes"), [(2, (4, 5)), (3, (2,))])
def test_any_number_of_ranks_finds_the_same(
    eight_processes: RankPool, tmp_path: Path, write_clips: WriteClips, clip_tokenizer: str,
    world_size: int, sizes: tuple[int, ...],
) -> None:  # fmt: skip
    shards = write_clips(*sizes)
    alone = make(settings_for(shards), clip_tokenizer).evaluate(micro_model()).metrics
    found = on_ranks(
        eight_processes, world_size, tmp_path, metrics_on_ranks, shards, clip_tokenizer
    )
    loss = alone.pop(LOSS)
    for (
        metrics
    ) in found:  # other micro-batches are rounded differently, which ranks must not affect
        assert metrics.pop(LOSS) == pytest.approx(loss, rel=1e-5)
    assert found == [alone] * world_size
    assert len(alone) == 11


@torch.no_grad()
def test_equals_the_model_used_by_hand(write_clips: WriteClips, clip_tokenizer: str) -> None:
    shards = write_clips(9)
    model = micro_model()
    found = (
        make(settings_for(shards, templates=["{}", "a {}"]), clip_tokenizer).evaluate(model).metrics
    )
    model.eval()
    audio = model.encode_audio(torch.stack([torch.from_numpy(tone(number)) for number in range(9)]))
    tokenizer = load_tokenizer(clip_tokenizer, vocab_size=512)

    def embed(captions: list[str]) -> torch.Tensor:
        return model.encode_text(*tokenize(captions, tokenizer, 16))

    classes = torch.stack(
        [F.normalize(embed([kind, f"a {kind}"]).mean(0), dim=0) for kind in KINDS]
    )
    assert found["zero_shot_top1"] == pytest.approx(
        np.mean((audio @ classes.T).argmax(1).numpy() == np.arange(9) % 3)
    )
    captions = [(n, caption) for n in range(9) for caption in description(n)["caption"]]
    scores = (embed([caption for _, caption in captions]) @ audio.T).numpy()
    logits = (
        model.logit_scale.exp() * audio @ embed([description(n)["caption"][0] for n in range(9)]).T
    )
    loss = (
        F.cross_entropy(logits, torch.arange(9)) + F.cross_entropy(logits.T, torch.arange(9))
    ) / 2
    assert found[LOSS] == pytest.approx(float(loss), rel=1e-4)
    ranks = [int((row > row[n]).sum()) + 1 for (n, _), row in zip(captions, scores, strict=True)]
    assert found["retrieval_text_to_audio_map10"] == pytest.approx(np.mean([1 / r for r in ranks]))


def test_features_are_evaluated_as_the_audio_they_were_made_of(
    tmp_path: Path, write_clips: WriteClips, clip_tokenizer: str
) -> None:
    encoded = write_clips(5)
    members = []
    for n in range(5):
        features = LogMel(MICRO.audio)(torch.from_numpy(tone(n))[None])[0]
        members += [
            (f"{n:04d}.npy", npy(features.half().numpy())),
            clip_members(n, description(n))[1],
        ]
    (folder := tmp_path / "mel").mkdir()
    write_manifest(
        folder,
        ShardManifest({"a.tar": ShardRecord(5, 0, 0.0, "")}, "mel", front_end_of(MICRO.audio)),
    )
    mel = [str(write_tar(folder / "a.tar", members))]
    expected, found = (
        make(settings_for(shards), clip_tokenizer).evaluate(micro_model())
        for shards in (encoded, mel)
    )
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
    both = EvaluationSettings.model_validate(
        {"retrieval": {"shards": encoded}, "zero_shot": {"shards": mel}}
    )
    with pytest.raises(CollectiveUserError, match="mixed"):
        make(both, clip_tokenizer)


def test_the_model_and_the_random_state_stay_as_they_were(
    write_clips: WriteClips, clip_tokenizer: str
) -> None:
    model = micro_model().train()
    model.text.eval()
    evaluator = make(settings_for(write_clips(5)), clip_tokenizer)

    def state() -> tuple[Any, ...]:
        modes = [module.training for module in model.modules()]
        numbers = [
            tensor.tolist() for tensor in (torch.get_rng_state(), *model.state_dict().values())
        ]
        return (
            modes,
            numbers,
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.is_grad_enabled(),
        )

    before = state()
    assert evaluator.evaluate(model).metrics == evaluator.evaluate(model).metrics
    assert state() == before
    with torch.no_grad():
        model.audio_projection.linear1.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="has diverged"):
        evaluator.evaluate(model)


def test_broken_clips_are_counted_and_named(
    write_clips: WriteClips, clip_tokenizer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = [("1000.wav", b"RIFF nothing"), ("1000.json", b'{"kind": "hum", "caption": "x"}')]
    extra += clip_members(1001, {"kind": "hum", "caption": " "}) + clip_members(
        1002, {"caption": "no class"}
    )
    evaluator = make(settings_for(write_clips(4, extra=extra)), clip_tokenizer)
    evaluation = evaluator.evaluate(micro_model())
    evaluator.evaluate(micro_model())
    assert evaluation.tasks["retrieval"].counts == {"clips": 5, "captions": 7}
    assert evaluation.tasks["zero_shot"].counts == {"clips": 5, "classes": 3}
    reasons = {broken.name.rsplit(" ", 1)[1]: broken.reason for broken in evaluation.broken}
    assert "can't be decoded" in reasons["1000"]
    assert reasons["1001"] == "empty caption"
    assert "kind in its json: expected a class name" in reasons["1002"]
    assert evaluation.to_dict()["num_broken_items"] == 3
    assert capfd.readouterr().err.count("skipped") == 3


def refusal_on_ranks(shards_by_rank: list[list[str]], tokenizer: str) -> str:
    ranks = ranks_here()
    with pytest.raises(CollectiveUserError) as caught:
        make(settings_for(shards_by_rank[ranks.rank]), tokenizer, ranks)
    return str(caught.value)


def test_ranks_that_see_different_shards_are_refused_alike(
    eight_processes: RankPool, tmp_path: Path, write_clips: WriteClips, clip_tokenizer: str
) -> None:
    shards = write_clips(3, 3)
    found = on_ranks(
        eight_processes, 2, tmp_path, refusal_on_ranks, [shards, shards[1:]], clip_tokenizer
    )
    assert all("different shards" in each for each in found)


HUM = clip_members(0, {"kind": "hum"})
FOUR = [member for number in range(4) for member in clip_members(number, description(number))]


@pytest.mark.parametrize(
    ("task", "members", "changes", "message"),
    [
        (
            "retrieval",
            [("a.wav", b"RIFF"), ("a.txt", b"a caption")],
            {},
            "retrieval.shards: none .* can be decoded",
        ),
        (
            "retrieval",
            FOUR,
            {"caption_key": "title"},
            "retrieval.shards: expected clips with captions",
        ),
        ("zero_shot", HUM, {}, "zero_shot.classes: expected at least 2 classes"),
        (
            "zero_shot",
            FOUR,
            {"class_key": "label"},
            "zero_shot.shards: expected clips with 'label'",
        ),
        (
            "zero_shot",
            FOUR,
            {"classes": {"hum": ["x"], "click": ["y"]}},
            "zero_shot.classes: .* 'hiss'",
        ),
        ("zero_shot", FOUR, {"shards": "nowhere-{0..3}.tar"}, "zero_shot.shards: .*does not exist"),
        (None, FOUR, {}, "tokenizer: missing"),
    ],
)
def test_mistakes_name_their_field(
    tmp_path: Path,
    clip_tokenizer: str,
    task: str | None,
    members: list[tuple[str, bytes]],
    changes: Any,
    message: str,
) -> None:
    settings = {
        task or "retrieval": {"shards": str(write_tar(tmp_path / "a.tar", members)), **changes}
    }
    with pytest.raises((CollectiveUserError, ValueError), match=rf"^clap\.evaluation\.{message}"):
        make(
            EvaluationSettings.model_validate(settings), clip_tokenizer if task else None
        ).evaluate(micro_model())
