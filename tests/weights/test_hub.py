"""Test the order and time limit of places to load from, pretrained text towers, and tokenizers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clap_ds.config.model import load_preset
from clap_ds.engine.factory import build_model
from clap_ds.weights import hub
from clap_ds.weights.hub import (
    SPECIAL_TOKENS,
    load_by_name,
    load_pretrained_text,
    load_tokenizer,
    tokenize,
)
from tests.model.reference_clap import MICRO_TEXT
from tests.training.reference_steps import settings

import transformers  # isort: skip

MICRO = load_preset("micro").text


@pytest.mark.parametrize(
    ("hub_responds", "is_on_hub", "message"),
    [
        (False, True, r"no answer within 4.0 s.*: hf download some/name --include '\*\.json'"),
        (True, False, "no such repository."),
        (True, True, ""),
    ],
)
def test_hub_is_the_last_place_and_must_respond(monkeypatch, hub_responds, is_on_hub, message):
    def head(url: str, timeout: float) -> None:
        if not hub_responds:
            raise TimeoutError(f"no answer within {timeout} s")

    def load(local_files_only: bool) -> str:
        if local_files_only or not is_on_hub:
            raise OSError("no such repository\nand more")
        return "loaded"

    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=head))
    if not message:
        assert load_by_name("some/name", load, field="field", kind="tokenizer") == "loaded"
        return
    start = "^field: no tokenizer 'some/name'; tried: no such folder in "
    with pytest.raises(ValueError, match=f"{start}.*; the Hub, .*: {message}"):
        load_by_name("some/name", load, field="field", kind="tokenizer")


def save_roberta(path: Path, **changes: Any) -> str:
    fields = {**MICRO_TEXT, "layer_norm_eps": 1e-5, "type_vocab_size": 1, **changes}
    transformers.RobertaModel(transformers.RobertaConfig(**fields)).save_pretrained(path)
    return str(path)


def test_text_tower_has_the_pretrained_weights_and_the_runs_dropout(tmp_path):
    config = MICRO.model_copy(update={"hub_name": save_roberta(tmp_path)})
    preset = load_preset("micro").model_copy(update={"text": config}).model_dump()
    model = {"preset": preset, "text_dropout": 0.2, "pretrained_text": True}
    clap = settings(model=model).clap
    tower = build_model(clap.model, clap.loss, torch.device("cpu")).text
    assert {part.p for part in tower.modules() if isinstance(part, nn.Dropout)} == {0.2}
    expected = transformers.RobertaModel.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close({**tower.roberta.state_dict()}, {**expected}, rtol=0, atol=0)


def test_unfit_or_missing_pretrained_weights_are_rejected(tmp_path):
    small = save_roberta(tmp_path / "small", num_hidden_layers=1, vocab_size=100)
    transformers.BertModel(transformers.BertConfig(**MICRO_TEXT)).save_pretrained(tmp_path / "bert")
    for name, message in (
        (str(tmp_path / "bert"), r"model_type bert \(expected roberta\)"),
        (small, r"vocab_size 100 \(expected 512\), num_hidden_layers 1 \(expected 2\)"),
        ("clap-ds-tests/no-such", r"pretrained_text: no weights '.*--include '\*\.safetensors'"),
        (MICRO.hub_name, "hub_name is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            load_pretrained_text(MICRO.model_copy(update={"hub_name": name}))


def test_captions_are_framed_truncated_and_padded(tokenizer_dir):
    """Check for RoBERTa's ids; captions that are too long keep their end token."""
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    long_caption = "a loud tone and " * 20
    ids, mask = tokenize(["a loud tone", "a", long_caption], tokenizer, 10)
    assert ids.dtype == mask.dtype == torch.int64
    length = int(mask[0].sum())
    assert mask[0].tolist() == [1] * length + [0] * (10 - length)
    assert ids[0, 0] == 0
    assert ids[0, length - 1 :].tolist() == [2] + [1] * (10 - length)
    assert tokenizer.decode(ids[0, 1 : length - 1].tolist()) == "a loud tone"
    whole, _ = tokenize([long_caption], tokenizer, 400)
    assert ids[2].tolist() == [*whole[0, :9].tolist(), 2]


def test_any_script_and_special_tokens_names_are_text(tokenizer_dir):
    caption = "</s> a <s><mask> 🔔 鐘の音 café\n"
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    ids, mask = tokenize([caption], tokenizer, 64)
    text_ids = ids[0, 1 : int(mask.sum()) - 1].tolist()
    assert min(text_ids) >= len(SPECIAL_TOKENS)
    assert tokenizer.decode(text_ids) == caption


def test_unfit_or_missing_tokenizers_are_rejected(tokenizer_dir, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    size = len(tokenizer)
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(tmp_path / "padding")
    for name, vocab_size, message in (
        (tokenizer_dir, size - 1, f"ids up to {size - 1} .* below {size - 1}"),
        (str(tmp_path / "padding"), 512, "pads with 3; expected .* 1 for padding"),
        (str(tmp_path), 512, "the folder .* holds no tokenizer"),
    ):
        with pytest.raises(ValueError, match=rf"clap\.data\.tokenizer: .*{message}"):
            load_tokenizer(name, vocab_size=vocab_size)
