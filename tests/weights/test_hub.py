"""Check that the hub is queried only after the cache, if it responds, and without waiting long."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from torch import nn

from clap_ds.config.model import load_preset
from clap_ds.engine.factory import build_model
from clap_ds.weights import hub
from clap_ds.weights.hub import load_by_name, pretrained_text
from tests.model.reference_clap import MICRO_TEXT
from tests.training.reference_steps import settings

import transformers  # isort: skip

MICRO = load_preset("micro").text


@pytest.mark.parametrize(
    ("status", "on_hub", "asked", "says"),
    [
        (None, True, [True], ": no answer within 4.0 s. Without a network, name a local folder"),
        (404, False, [True, False], ": no such repository"),
        (200, True, [True, False], "found"),
    ],
)
def test_places_are_asked_in_turn(
    monkeypatch: pytest.MonkeyPatch, status: int | None, on_hub: bool, asked: list[bool], says: str
) -> None:
    def head(url: str, timeout: float) -> SimpleNamespace:
        if status is None:
            raise TimeoutError(f"no answer within {timeout} s")
        return SimpleNamespace(status_code=status)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=head))
    places = []

    def load(local_files_only: bool) -> str:
        places.append(local_files_only)
        if local_files_only or not on_hub:
            raise OSError("no such repository\nand more")
        return "found"

    try:
        found = load_by_name("some/name", load, field="field", what="tokenizer")
    except ValueError as error:
        found = str(error)
        assert found.startswith("field: no tokenizer 'some/name'; tried: no such folder in ")
        assert f"not in the Hub's local cache, {constants.HF_HUB_CACHE}; the Hub, " in found
    assert says in found
    assert "and more" not in found
    assert places == asked


def pretrained_folder(path: Path, **changes) -> str:
    config = transformers.RobertaConfig(
        **{**MICRO_TEXT, "layer_norm_eps": 1e-5, "type_vocab_size": 1, **changes}
    )
    transformers.RobertaModel(config).save_pretrained(path)
    return str(path)


def test_pretrained_weights_come_from_the_named_place(tmp_path: Path) -> None:
    config = MICRO.model_copy(update={"hub_name": pretrained_folder(tmp_path)})
    preset = load_preset("micro").model_copy(update={"text": config})
    model = {"preset": preset.model_dump(), "text_dropout": 0.2}
    runs = [settings(model={**model, "pretrained_text": on}).clap for on in (True, False)]
    towers = [build_model(run.model, run.loss, torch.device("cpu")).text for run in runs]
    loaded = towers[0].roberta
    expected = transformers.RobertaModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.state_dict().keys() == expected.keys()
    for found in towers:
        of = {
            kind: [each for each in found.modules() if isinstance(each, kind)]
            for kind in (nn.Dropout, nn.LayerNorm)
        }
        assert {each.p for each in of[nn.Dropout]} == {0.2}
        assert {each.eps for each in of[nn.LayerNorm]} == {1e-5}


def test_pretrained_weights_that_do_not_fit_or_cannot_be_had_are_a_clear_error(
    tmp_path: Path,
) -> None:
    other = pretrained_folder(tmp_path / "other", num_hidden_layers=1, vocab_size=100)
    transformers.BertModel(transformers.BertConfig(**MICRO_TEXT)).save_pretrained(tmp_path / "bert")
    for name, message in (
        (str(tmp_path / "bert"), r"model_type bert \(expected roberta\)"),
        (other, r"vocab_size 100 \(expected 512\), num_hidden_layers 1 \(expected 2\)"),
        (
            "clap-ds-tests/no-such-checkpoint",
            "pretrained_text: no weights 'clap-ds-tests/no-such-.*HF_HUB_OFFLINE",
        ),
        ("/no/such/folder", "pretrained_text: no weights '/no/such/folder'; tried: no such folder"),
        (MICRO.hub_name, "hub_name is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrained_text(MICRO.model_copy(update={"hub_name": name}))
