import contextlib
import io
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from clap_ds.config.errors import exit_code_of
from clap_ds.config.sections import ShardData, ZeroShotSettings
from clap_ds.data.captions import captions_of
from clap_ds.data.decoding import AUDIO_FORMATS
from clap_ds.data.items import choose_clip
from clap_ds.model.tokenizer import load_tokenizer
from examples.synthetic_sounds.__main__ import SAMPLE_RATES, encode, main, make_clip
from examples.synthetic_sounds.kinds import KINDS, LOUDNESS
from tests.data.tars import items_in

NUM_CLIPS = 2 * len(KINDS)
SMALL = ("--clips", str(NUM_CLIPS), "--shards", "3", "--seconds", "0.2-0.6")


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sounds") / "made"
    assert main([str(directory), *SMALL]) == 0
    return directory


def decoded(item: dict[str, bytes]) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(choose_clip(item, "encoded")), always_2d=True)


def test_clips_are_real_audio_of_every_sort_with_their_captions(sounds: Path) -> None:
    items = list(items_in(sounds).values())
    audio = [decoded(item) for item in items]
    assert all(0.19 <= len(samples) / rate <= 0.7 for samples, rate in audio)
    assert all(0.005 < np.abs(samples).max() < 1.1 for samples, _ in audio)  # lossy codecs overshoot a little
    assert {rate for _, rate in audio} == {16000, 22050, 44100, 48000}
    assert {samples.shape[1] for samples, _ in audio} == {1, 2}
    assert {extension for item in items for extension in item} == {*AUDIO_FORMATS, "txt", "json"}
    kinds = [json.loads(item["json"])["kind"] for item in items]
    assert Counter(kinds) == {kind.label: 2 for kind in KINDS}
    nouns, captions = {kind.label: kind.nouns["all"] for kind in KINDS}, [captions_of(item) for item in items]
    for kind, own in zip(kinds, captions, strict=True):
        assert all(any(noun in each for noun in nouns[kind]) for each in own)
    assert len({own[0] for own in captions}) > 0.9 * NUM_CLIPS
    tokenizer = load_tokenizer(str(sounds / "tokenizer"), vocab_size=512)  # the micro preset's
    assert max(len(ids) for own in captions for ids in tokenizer(own)["input_ids"]) <= 40
    classes = json.loads((sounds / "classes.json").read_text())
    for wordings in ("train", "held_out"):
        assert set(classes[wordings]) == {kind.label for kind in KINDS}
        assert ZeroShotSettings(shards="x", classes=classes[wordings]).classes == classes[wordings]
    assert "an earth rumbling" in classes["train"]["rumble"]


def test_same_seed_same_sounds_and_captions(sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "again"), *SMALL])
    settings = ShardData.model_validate_json(capsys.readouterr().out.partition('"data": ')[2])
    assert (settings.shards, settings.tokenizer) == (f"{tmp_path}/again/sounds-*.tar", f"{tmp_path}/again/tokenizer")
    main([str(tmp_path / "other"), *SMALL, "--seed", "1"])
    first, again, other = items_in(sounds), items_in(tmp_path / "again"), items_in(tmp_path / "other")
    for key, item in first.items():
        assert item.keys() == again[key].keys()
        assert all(item[name] == again[key][name] for name in {"json", "txt", "flac", "mp3"} & item.keys())
        np.testing.assert_array_equal(decoded(item)[0], decoded(again[key])[0])
    ours, theirs = (folder / "tokenizer/tokenizer.json" for folder in (sounds, tmp_path / "again"))
    assert ours.read_text() == theirs.read_text()
    assert sum(item["json"] == other[key]["json"] for key, item in first.items()) < NUM_CLIPS // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exists and isn't an empty folder"),
        (["--clips", "2", "--shards", "3"], "a shard would be empty"),
        *((["--seconds", text], f"invalid seconds value: '{text}'") for text in ("5-1", "a", "0")),
        (["--sample_rate", "400"], "from 8000 to 48000, found '400'"),
    ],
)
def test_impossible_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "mine.txt").touch()
    with contextlib.suppress(SystemExit):  # by argparse, whose code is 2
        assert exit_code_of(lambda: main([str(tmp_path / "new" if arguments else tmp_path), *arguments])) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_clips_are_finite_and_as_loud_as_drawn_and_long_vorbis_files_whole() -> None:
    for kind in KINDS:
        for seed in range(5):
            waveform, _, captions = make_clip(kind, random.Random(seed), (0.05, 2.0), SAMPLE_RATES, "all")
            assert np.isfinite(waveform).all(), kind.label
            assert LOUDNESS.low <= np.abs(waveform).max() <= LOUDNESS.high
            assert 1 <= len(captions) <= 3
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (40 * 48000, 2))
    assert soundfile.info(io.BytesIO(encode(noise, 48000, "ogg", "VORBIS"))).frames == len(noise)


def test_wordings_format_and_rate_are_as_wanted(tmp_path: Path) -> None:
    captions = []
    for wordings in ("train", "held_out"):
        arguments = ["--clips", "260", "--seconds", "0.1", "--format", "wav", "--sample_rate", "8000"]
        assert main([str(tmp_path / wordings), *arguments, "--wordings", wordings]) == 0
        items = items_in(tmp_path / wordings).values()
        assert {extension for item in items for extension in item} == {"wav", "txt", "json"}
        assert {decoded(item)[1] for item in items} == {8000}
        captions.append({caption for item in items for caption in captions_of(item)})
    assert not captions[0] & captions[1]
