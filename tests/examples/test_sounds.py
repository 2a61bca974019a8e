import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from clap_ds.config.schema import ZeroShotSettings
from clap_ds.data.clip import captions_of, choose_clip
from clap_ds.utils.errors import exit_code_of
from examples.synthetic_sounds.__main__ import main
from examples.synthetic_sounds.kinds import KINDS
from tests.data.tars import items_in

NUM_CLIPS = 4 * len(KINDS)
SMALL = ("--clips", str(NUM_CLIPS), "--shards", "3", "--seconds", "0.2-0.6")


def decoded(item: dict[str, bytes]) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(choose_clip(item, "encoded")), always_2d=True)


def test_same_seed_same_sounds_and_captions_of_every_sort(tmp_path: Path) -> None:
    for name, seed in (("made", "0"), ("again", "0"), ("other", "1")):
        main([str(tmp_path / name), *SMALL, "--seed", seed])
    first, again, other = (items_in(tmp_path / name) for name in ("made", "again", "other"))
    audio = [decoded(item) for item in first.values()]
    assert all(0.19 <= len(samples) / rate <= 0.7 for samples, rate in audio)
    assert {rate for _, rate in audio} == {16000, 22050, 44100, 48000}
    assert {samples.shape[1] for samples, _ in audio} == {1, 2}
    assert Counter(json.loads(item["json"])["kind"] for item in first.values()) == {
        kind.label: 4 for kind in KINDS
    }
    for key, item in first.items():
        assert captions_of(item) == captions_of(again[key])
        np.testing.assert_array_equal(decoded(item)[0], decoded(again[key])[0])
    assert sum(item["json"] == other[key]["json"] for key, item in first.items()) < NUM_CLIPS // 2
    classes = json.loads((tmp_path / "made" / "classes.json").read_text())["held_out"]
    assert ZeroShotSettings(shards="x", classes=classes).classes == classes


def test_wordings_format_and_rate_are_as_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = []
    for wordings in ("train", "held_out"):
        arguments = [
            "--clips",
            "120",
            "--seconds",
            "0.1",
            "--format",
            "wav",
            "--sample_rate",
            "8000",
        ]
        main([str(tmp_path / wordings), *arguments, "--wordings", wordings])
        items = items_in(tmp_path / wordings).values()
        assert {decoded({"wav": item["wav"]})[1] for item in items} == {8000}
        captions.append({caption for item in items for caption in captions_of(item)})
    assert not captions[0] & captions[1]
    assert exit_code_of(lambda: main([str(tmp_path)])) == 2
    assert "isn't an empty folder" in capsys.readouterr().err
