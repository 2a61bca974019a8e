"""Model sizes read from a path are stored with the run; errors in them take one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError

MICRO = load_preset("micro")
SIZES: dict[str, Any] = MICRO.model_dump(mode="json", exclude={"name"})
CLAP: dict[str, Any] = {"model_type": "clap"}


def changed(section: str, **fields: Any) -> dict[str, Any]:
    return {**SIZES, section: {**SIZES[section], **fields}}


def test_a_run_keeps_the_sizes_where_the_file_is_gone(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    again = tmp_path / "config.json"
    own.write_text(json.dumps(SIZES))
    assert load_preset(str(own)) == MICRO.model_copy(update={"name": "own"})
    own.write_text(json.dumps(changed("text", num_layers=3)))
    run = load_run(write_run(clap={"model": {"preset": str(own)}}))
    own.unlink()
    again.write_text(json.dumps(run.resolved()))
    assert load_run(again).clap == run.clap
    assert (run.clap.preset().name, run.clap.preset().text.num_layers) == ("own", 3)
    folders = [
        each.checkpoint_folder.name.split("-")[1]
        for each in (run, load_run(again), load_run(write_run()))
    ]
    assert folders[0] == folders[1] != folders[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            None,
            r"no preset '.*own.json'; expected one of .*, demo, .*; or the path of a preset's JSON",
        ),
        (
            changed("audio", embed_dm=8),
            r"own.json: audio\.embed_dm: no such field; did you mean 'audio.embed_dim'\?",
        ),
        (changed("text", num_heads=3), "text: hidden_size 32 doesn't divide into num_heads 3"),
        ({"model_type": "bert"}, "config.json has model_type 'bert', expected 'clap'"),
        (
            {**CLAP, "text_config": {"hidden_act": "relu"}},
            "own.json: text_config.hidden_act is 'relu'; only 'gelu'",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    content: Any, message: str, write_run: Callable[..., Path], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "own.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    with pytest.raises(UserError, match=rf"run\.json: clap\.model\.preset: .*{message}") as refusal:
        load_run(write_run(clap={"model": {"preset": str(tmp_path / "own.json")}}))
    assert "\n" not in str(refusal.value)
