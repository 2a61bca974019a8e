"""The evaluator on the micro model: the same for any number of ranks, nothing of the model changed, mistakes found at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.sections import EvaluationSettings, RetrievalSettings, ZeroShotSettings
from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation.evaluator import Evaluator
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import load_tokenizer, tokenize
from tests.data.tars import write_tar
from tests.evaluation.conftest import KINDS, clip_members, description, tell_captions_apart
from tests.ranks import RankPool, in_group_of

ALONE = Ranks(0, 1, 0, 1)
WriteClips = Callable[..., list[str]]


def micro() -> ClapConfig:
    model = load_preset("micro")
    return model.model_copy(update={"audio": model.audio.model_copy(update={"num_samples": 4800})})


def micro_model() -> ClapModel:
    torch.manual_seed(0)
    return tell_captions_apart(ClapModel(micro(), text_dropout=0.5))


def settings_for(shards: list[str], **zero_shot: Any) -> EvaluationSettings:
    return EvaluationSettings(
        retrieval=RetrievalSettings(shards=shards), zero_shot=ZeroShotSettings(shards=shards, **zero_shot)
    )


def make(settings: EvaluationSettings, tokenizer: str | None, ranks: Ranks = ALONE, micro_batch: int = 4) -> Evaluator:
    return Evaluator(
        settings,
        model_config=micro(),
        tokenizer_name=tokenizer,
        text_tokens=16,
        micro_batch=micro_batch,
        ranks=ranks,
        device=torch.device("cpu"),
    )


def metrics_on_ranks(shards: list[str], tokenizer: str, micro_batch: int) -> dict[str, float]:
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0, 1)
    return make(settings_for(shards), tokenizer, ranks, micro_batch).run(micro_model())


@pytest.mark.parametrize(("world_size", "sizes"), [(2, (4, 5)), (3, (2,)), (3, (7, 3))])
def test_any_number_of_ranks_finds_the_same(
    three_processes: RankPool,
    tmp_path: Path,
    write_clips: WriteClips,
    clip_tokenizer: str,
    world_size: int,
    sizes: tuple[int, ...],
) -> None:
    shards = write_clips(*sizes)
    arguments = world_size, str(tmp_path / "store"), metrics_on_ranks, shards, clip_tokenizer, 4
    answers = [answer for answer in three_processes.run(in_group_of, *arguments) if answer is not None]
    alone = make(settings_for(shards), clip_tokenizer).run(micro_model())
    assert answers == [alone] * world_size
    assert len(alone) == 11


def refusal_on_ranks(shards_by_rank: list[list[str]], tokenizer: str) -> str:
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0, 1)
    with pytest.raises(ValueError, match="shards") as caught:
        make(settings_for(shards_by_rank[ranks.rank]), tokenizer, ranks)
    return str(caught.value)


def test_a_mistake_on_one_rank_is_told_by_all(
    three_processes: RankPool, tmp_path: Path, write_clips: WriteClips, clip_tokenizer: str
) -> None:
    shards = write_clips(3, 3)
    for name, others, message in (
        ("missing", ["nowhere.tar"], "rank 1: clap.evaluation.retrieval.shards: 1 of the 1 files"),
        (
            "different",
            shards[1:],
            "clap.evaluation: the ranks see different shards (clips by rank: rank 0: 6, rank 1: 3)",
        ),
    ):
        arguments = 2, str(tmp_path / name), refusal_on_ranks, [shards, others], clip_tokenizer
        answers = [answer for answer in three_processes.run(in_group_of, *arguments) if answer is not None]
        assert len(answers) == 2
        assert answers[0] == answers[1]
        assert message in answers[0]


@torch.no_grad()
def test_equals_the_model_used_by_hand(write_clips: WriteClips, clip_tokenizer: str) -> None:
    shards = write_clips(9)
    model = micro_model()
    found = make(settings_for(shards, templates=["{}", "a {}"]), clip_tokenizer).run(model)
    model.eval()
    waveforms = torch.stack([torch.sin(torch.arange(4800).double() * 0.01 * (n + 1)).float() * 0.5 for n in range(9)])
    audio = model.encode_audio(waveforms)
    tokenizer = load_tokenizer(clip_tokenizer, vocab_size=512)

    def embed(captions: list[str]) -> torch.Tensor:
        return model.encode_text(*tokenize(captions, tokenizer, 16))

    labels = np.arange(9) % 3
    classes = torch.stack([F.normalize(embed([kind, f"a {kind}"]).mean(0), dim=0) for kind in KINDS])
    assert found["zero_shot_top1"] == pytest.approx(np.mean((audio @ classes.T).argmax(1).numpy() == labels))
    captions = [(n, caption) for n in range(9) for caption in description(n)["caption"]]
    scores = (embed([caption for _, caption in captions]) @ audio.T).numpy()
    ranks = [int((row > row[n]).sum()) + 1 for (n, _), row in zip(captions, scores, strict=True)]
    assert found["retrieval_text_to_audio_r5"] == pytest.approx(np.mean(np.array(ranks) <= 5))
    assert found["retrieval_text_to_audio_map10"] == pytest.approx(np.mean([1 / r for r in ranks]))


def test_the_model_and_the_random_state_stay_as_they_were(write_clips: WriteClips, clip_tokenizer: str) -> None:
    model = micro_model()
    model.train()
    model.text.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluator = make(settings_for(write_clips(5)), clip_tokenizer)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first, second = evaluator.run(model), evaluator.run(model)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])
    assert first == second
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_a_model_in_16_bits(write_clips: WriteClips, clip_tokenizer: str) -> None:
    found = make(settings_for(write_clips(5)), clip_tokenizer).run(micro_model().to(torch.bfloat16))
    assert all(0 <= value <= 1 for value in found.values())


def test_broken_clips_are_counted_and_named(
    write_clips: WriteClips, clip_tokenizer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = [
        ("1000.wav", b"RIFF nothing"), ("1000.json", b'{"kind": "hum", "caption": "x"}'),
        *clip_members(1001, {"kind": "hum", "caption": " "}),
        *clip_members(1002, {"caption": "no class"}),
    ]  # fmt: skip
    evaluator = make(settings_for(write_clips(4, extra=extra)), clip_tokenizer)
    evaluation = evaluator.evaluate(micro_model())
    evaluator.run(micro_model())
    assert evaluation.tasks["retrieval"].counts == {"clips": 5, "captions": 7}
    assert evaluation.tasks["zero_shot"].counts == {"clips": 5, "classes": 3}
    reasons = {broken.name.rsplit(" ", 1)[1]: broken.reason for broken in evaluation.broken}
    assert reasons["1001"] == "empty caption"
    assert reasons["1002"] == "no kind in its json"
    assert "can't be decoded" in reasons["1000"]
    assert len(evaluation.to_dict()["broken_items"]) == evaluation.to_dict()["num_broken_items"] == 3
    assert capfd.readouterr().err.count("skipped") == 3


def test_given_classes(write_clips: WriteClips, clip_tokenizer: str) -> None:
    classes = {"hum": ["hum", "low hum"], "click": ["click"], "hiss": ["hiss"], "silence": ["nothing"]}
    evaluation = make(settings_for(write_clips(6), classes=classes), clip_tokenizer).evaluate(micro_model())
    assert evaluation.tasks["zero_shot"].counts == {"clips": 6, "classes": 4}
    assert evaluation.tasks["zero_shot"].measures["zero_shot_top1"].chance == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"templates": ["{}", "a sound"]}, "zero_shot.templates: expected {} where the class name goes, found 'a sound'"),
        ({"class_field": "label"}, "none of the 4 clips with audio has 'label' (clap.evaluation.zero_shot.class_field)"),
        ({"classes": {"hum": ["hum"], "click": ["click"]}}, "zero_shot.classes: the shards have 'hiss'"),
        ({"classes": {"hum": [], "click": ["click"], "hiss": ["hiss"]}}, "'hum' has no name for captions"),
        ({"shards": "nowhere-{0..3}.tar"}, "clap.evaluation.zero_shot.shards: 4 of the 4 files"),
    ],
)  # fmt: skip
def test_mistakes_in_zero_shot(
    write_clips: WriteClips, clip_tokenizer: str, changes: dict[str, Any], message: str
) -> None:
    zero_shot = ZeroShotSettings(**{"shards": write_clips(4), **changes})
    with pytest.raises(ValueError, match=r"clap\.evaluation") as caught:
        make(EvaluationSettings(zero_shot=zero_shot), clip_tokenizer)
    assert message in str(caught.value)


def test_one_class_alone_is_refused(tmp_path: Path, clip_tokenizer: str) -> None:
    members = [m for n in range(3) for m in clip_members(n, {"kind": "hum"})]
    shards = [str(write_tar(tmp_path / "a.tar", members))]
    with pytest.raises(ValueError, match="at least 2 classes to tell apart, found 'hum'"):
        make(EvaluationSettings(zero_shot=ZeroShotSettings(shards=shards)), clip_tokenizer)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.txt", b"a caption")], "no item with audio in 1 shard"),
        ([("a.wav", b"RIFF"), ("a.txt", b"a caption")], "none of the 1 clips can be decoded"),
        (clip_members(0, {"kind": "hum"}), "none of the 1 clips with audio has a caption"),
    ],
)
def test_shards_without_a_usable_clip(
    tmp_path: Path, clip_tokenizer: str, members: list[tuple[str, bytes]], message: str
) -> None:
    shards = [str(write_tar(tmp_path / "a.tar", members))]
    with pytest.raises(ValueError, match=r"clap\.evaluation\.retrieval\.shards") as caught:
        make(EvaluationSettings(retrieval=RetrievalSettings(shards=shards)), clip_tokenizer)
    assert message in str(caught.value)


@pytest.mark.parametrize("tokenizer", [None, "./nowhere"])
def test_a_missing_tokenizer(write_clips: WriteClips, tokenizer: str | None) -> None:
    with pytest.raises(ValueError, match=r"clap\.evaluation\.tokenizer: "):
        make(settings_for(write_clips(1)), tokenizer)


def test_nothing_to_evaluate(clip_tokenizer: str) -> None:
    with pytest.raises(ValueError, match="retrieval, zero_shot or both"):
        make(EvaluationSettings(), clip_tokenizer)
