import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import soundfile

from clap_ds.data.clip import captions_of, choose_clip
from clap_ds.utils.errors import exit_code_of
from examples.synthetic_sounds.__main__ import main
from examples.synthetic_sounds.kinds import KINDS
from tests.data.tars import items_in


def make(folder: Path, options: str) -> dict[str, dict[str, bytes]]:
    main([str(folder), *options.split()])
    return items_in(folder)


def decode(item: dict[str, bytes]) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(choose_clip(item, "encoded")), always_2d=True)


def test_sounds_depend_on_seed_alone(tmp_path):
    options = "--clips 24 --shards 3 --seconds 0.2-0.6 --seed"
    items = make(tmp_path / "first", f"{options} 0")
    repeated = make(tmp_path / "second", f"{options} 0")
    different = make(tmp_path / "third", f"{options} 1")
    for key, item in items.items():
        assert captions_of(item) == captions_of(repeated[key])
        np.testing.assert_array_equal(decode(item)[0], decode(repeated[key])[0])
    assert [*map(captions_of, items.values())] != [*map(captions_of, different.values())]


def test_sounds_have_varied_kinds_rates_channels_and_lengths(tmp_path):
    items = make(tmp_path / "sounds", f"--clips {4 * len(KINDS)} --seconds 0.2-0.6").values()
    kinds = Counter(json.loads(item["json"])["kind"] for item in items)
    assert kinds == {kind.label: 4 for kind in KINDS}
    sounds = [decode(item) for item in items]
    assert {rate for _, rate in sounds} == {16000, 22050, 44100, 48000}
    assert {samples.shape[1] for samples, _ in sounds} == {1, 2}
    # MP3 adds up to 0.1 s.
    assert all(0.19 <= len(samples) / rate <= 0.7 for samples, rate in sounds)
    assert (
        json.loads((tmp_path / "sounds" / "classes.json").read_text())["held_out"].keys()
        == kinds.keys()
    )


def test_wordings_have_different_captions_at_one_format_and_rate(tmp_path):
    captions = {}
    for wordings in ("train", "held_out"):
        options = "--clips 48 --seconds 0.1 --format wav --sample_rate 8000 --wordings"
        items = make(tmp_path / wordings, f"{options} {wordings}").values()
        assert {decode({"wav": item["wav"]})[1] for item in items} == {8000}
        captions[wordings] = set().union(*map(captions_of, items))
    assert captions["train"].isdisjoint(captions["held_out"])


def test_folder_with_files_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert exit_code_of(lambda: main([str(tmp_path)])) == 2
    assert "isn't an empty folder" in capsys.readouterr().err
