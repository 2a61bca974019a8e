from __future__ import annotations

import io
import json
import random
import re
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.config.sections import ShardData, ZeroShotSettings
from clap_ds.data.batch import build_batches
from clap_ds.data.items import AUDIO_FORMATS, captions_of, choose_audio, choose_caption
from clap_ds.model.tokenizer import load_tokenizer
from examples.synthetic_sounds.__main__ import Variety, encode, main, make_clip
from examples.synthetic_sounds.captions import HELD_OUT_TEMPLATES, TEMPLATES, class_names, nouns_of
from examples.synthetic_sounds.kinds import KINDS, LOUDNESS, Kind

NUM_CLIPS = 52

Items = dict[str, dict[str, bytes]]


def run(directory: Path, *arguments: str) -> int:
    return main([str(directory), "--clips", str(NUM_CLIPS), "--shards", "3", "--seconds", "0.2-0.6", *arguments])


def items_in(directory: Path) -> Items:
    items: Items = {}
    for path in sorted(directory.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, extension = member.name.split(".")
                content = tar.extractfile(member)
                assert content is not None
                items.setdefault(key, {})[extension] = content.read()
    return items


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sounds") / "made"
    assert run(directory) == 0
    return directory


def decoded(item: dict[str, bytes]) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(choose_audio(item)), always_2d=True)


def test_clips_are_real_audio_of_every_sort(sounds: Path) -> None:
    items = items_in(sounds)
    assert len(items) == NUM_CLIPS
    formats, rates, channels = Counter[str](), Counter[int](), Counter[int]()
    for item in items.values():
        samples, rate = decoded(item)
        assert 0.19 <= len(samples) / rate <= 0.7
        assert 0.005 < np.abs(samples).max() < 1.1  # lossy codecs overshoot a little
        formats.update(extension for extension in item if extension in AUDIO_FORMATS)
        rates[rate] += 1
        channels[samples.shape[1]] += 1
    assert set(formats) == set(AUDIO_FORMATS)
    assert set(rates) == {16000, 22050, 44100, 48000}
    assert set(channels) == {1, 2}


def test_every_clip_names_its_kind_and_has_a_caption(sounds: Path) -> None:
    items = items_in(sounds)
    assert Counter(json.loads(item["json"])["kind"] for item in items.values()) == {kind.label: 2 for kind in KINDS}
    assert {"txt" in item for item in items.values()} == {True, False}
    captions = [choose_caption(item, random.Random(0)) for item in items.values()]
    assert len(set(captions)) > 0.9 * NUM_CLIPS
    for item in items.values():
        kind = next(kind for kind in KINDS if kind.label == json.loads(item["json"])["kind"])
        assert any(noun in choose_caption(item, random.Random(0)) for noun in nouns_of(kind, "all"))


def test_tokenizer_fits_the_micro_preset(sounds: Path) -> None:
    tokenizer = load_tokenizer(str(sounds / "tokenizer"), vocab_size=load_preset("micro").text.vocab_size)
    lengths = [
        len(tokenizer(choose_caption(item, random.Random(0)))["input_ids"]) for item in items_in(sounds).values()
    ]
    assert max(lengths) <= 40


def test_printed_settings_load_the_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "made") == 0
    settings = ShardData.model_validate_json(capsys.readouterr().out.partition('"data": ')[2])
    with build_batches(
        settings.model_copy(update={"num_workers": 0}),
        model=load_preset("micro"),
        text_tokens=32,
        micro_batch=NUM_CLIPS,
        rank=0,
        world_size=1,
        seed=0,
        device=torch.device("cpu"),
    ) as source:
        batch = next(source)
        assert source.statistics()["num_broken_items"] == 0
    assert batch.waveforms.shape == (NUM_CLIPS, 48000)
    assert (batch.waveforms.abs().amax(1) > 0.005).all()


def test_same_seed_same_sounds_and_captions(sounds: Path, tmp_path: Path) -> None:
    run(tmp_path / "again")
    run(tmp_path / "other", "--seed", "1")
    first, again, other = items_in(sounds), items_in(tmp_path / "again"), items_in(tmp_path / "other")
    assert first.keys() == again.keys()
    for key, item in first.items():
        assert item.keys() == again[key].keys()
        assert all(item[name] == again[key][name] for name in {"json", "txt", "flac", "mp3"} & item.keys())
        np.testing.assert_array_equal(decoded(item)[0], decoded(again[key])[0])
    assert (sounds / "tokenizer/tokenizer.json").read_text() == (
        tmp_path / "again/tokenizer/tokenizer.json"
    ).read_text()
    assert sum(item["json"] == other[key]["json"] for key, item in first.items()) < NUM_CLIPS // 2


def test_full_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(SystemExit) as exit_info:
        run(tmp_path)
    assert exit_info.value.code == 2
    assert f"{tmp_path} exists and isn't an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clips", "2", "--shards", "3"], "a shard would be empty"),
        (["--clips", "0"], "a whole number above 0, found '0'"),
        (["--clips", "many"], "a whole number above 0, found 'many'"),
        (["--seconds", "5-1"], "found '5-1'"),
        (["--seconds", "0"], "found '0'"),
        (["--seconds", "1-2-3"], "found '1-2-3'"),
        (["--wordings", "other"], "invalid choice: 'other'"),
        (["--format", "aac"], "invalid choice: 'aac'"),
        (["--sample_rate", "400"], "expected 8000 to 48000 Hz"),
    ],
)
def test_impossible_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([str(tmp_path / "new"), *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_clips_are_finite_and_as_loud_as_drawn(kind: Kind) -> None:
    for seed in range(5):
        clip = make_clip(kind, random.Random(seed), Variety(min_seconds=0.05, max_seconds=2.0))
        assert np.isfinite(clip.waveform).all()
        assert LOUDNESS.low <= np.abs(clip.waveform).max() <= LOUDNESS.high
        assert 1 <= len(clip.captions) <= 3


def test_long_vorbis_files_are_written_whole() -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (40 * 48000, 2))
    assert soundfile.info(io.BytesIO(encode(noise, 48000, "ogg", "VORBIS"))).frames == len(noise)


def captions_in(directory: Path) -> list[str]:
    return [caption for item in items_in(directory).values() for caption in captions_of(item)]


def test_held_out_wordings_are_new_and_made_of_known_words(tmp_path: Path) -> None:
    for wordings in ("train", "held_out"):
        arguments = ["--clips", "520", "--seconds", "0.1", "--format", "wav", "--sample_rate", "8000"]
        assert main([str(tmp_path / wordings), *arguments, "--wordings", wordings]) == 0
    train, held_out = captions_in(tmp_path / "train"), captions_in(tmp_path / "held_out")
    assert len(held_out) >= 520
    assert not set(train) & set(held_out)
    known = {word for caption in train for word in re.findall(r"[\w-]+", caption)}
    assert {word for caption in held_out for word in re.findall(r"[\w-]+", caption)} <= known
    formats = {extension for item in items_in(tmp_path / "train").values() for extension in item}
    assert formats <= {"wav", "txt", "json"}
    assert {decoded(item)[1] for item in items_in(tmp_path / "train").values()} == {8000}


def test_held_out_nouns_can_be_understood_from_the_kind_s_own_words() -> None:
    """Every word but the smallest stands in a training name of the same kind, and no held-out name is a training name."""
    for kind in KINDS:
        known = set(" ".join(kind.nouns).split()) | {"a", "of", "on", "the"}
        assert set(" ".join(kind.held_out_nouns).split()) <= known, kind.label
    assert not set(TEMPLATES) & set(HELD_OUT_TEMPLATES)
    every = [noun for kind in KINDS for noun in nouns_of(kind, "all")]
    assert len(every) == len(set(every))


def test_classes_file_has_the_names_of_all_kinds(sounds: Path) -> None:
    assert json.loads((sounds / "classes.json").read_text()) == class_names()
    for wordings in ("train", "held_out"):
        names = class_names()[wordings]
        assert set(names) == {kind.label for kind in KINDS}
        assert ZeroShotSettings.model_validate({"shards": "x", "classes": names}).classes == names
    assert "an earth rumbling" in class_names()["train"]["rumble"]


def test_there_are_twenty_kinds_or_more() -> None:
    assert len({kind.label for kind in KINDS}) == len(KINDS) >= 20
