"""Model sizes read from a path are stored with the run; errors in them take one line."""

import json
from typing import Any

import pytest

from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError

MICRO = load_preset("micro")
SIZES: dict[str, Any] = MICRO.model_dump(mode="json", exclude={"name"})


def with_sizes(section: str, **fields: Any) -> dict[str, Any]:
    return {**SIZES, section: {**SIZES[section], **fields}}


def test_run_with_preset_path_keeps_sizes_after_the_file_is_deleted(write_run, tmp_path):
    preset = tmp_path / "own.json"
    preset.write_text(json.dumps(with_sizes("text", num_layers=3)))
    run = load_run(write_run(clap={"model": {"preset": str(preset)}}))
    sizes = run.clap.preset()
    assert (sizes.name, sizes.text.num_layers) == ("own", 3)

    preset.unlink()
    record = tmp_path / "config.json"
    record.write_text(json.dumps(run.resolved()))
    resumed = load_run(record)
    assert resumed.clap == run.clap
    # Folders are named RUN-HASH-checkpoints.
    same, different = (
        other.checkpoint_folder.name.split("-")[1] for other in (resumed, load_run(write_run()))
    )
    assert run.checkpoint_folder.name.split("-")[1] == same != different


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no preset '.*own.json'; expected one of .*, demo, .*; or the path of a preset"),
        (
            with_sizes("audio", embed_dm=8),
            r"own.json: audio\.embed_dm: no such field; did you mean 'audio.embed_dim'\?",
        ),
        (with_sizes("text", num_heads=3), "text: hidden_size 32 doesn't divide into num_heads 3"),
        (with_sizes("audio", image_size=100), "image_size 100 is not a multiple"),
        (with_sizes("audio", num_heads=[3]), "num_heads has 1"),
        ({"model_type": "bert"}, "config.json has model_type 'bert', expected 'clap'"),
        (
            {"model_type": "clap", "text_config": {"hidden_act": "relu"}},
            "own.json: text_config.hidden_act is 'relu'; only 'gelu'",
        ),
    ],
)
def test_preset_path_with_wrong_content_is_refused_in_a_line(content, message, write_run, tmp_path):
    preset = tmp_path / "own.json"
    if content is not None:
        preset.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"run\.json: clap\.model\.preset: .*{message}") as refusal:
        load_run(write_run(clap={"model": {"preset": str(preset)}}))
    assert "\n" not in str(refusal.value)
