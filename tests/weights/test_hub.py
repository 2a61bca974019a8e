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

from transformers import AutoTokenizer

from clap_ds.weights.hub import SPECIAL_TOKENS, load_tokenizer, tokenize

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
        found = load_by_name("some/name", load, field="field", kind="tokenizer")
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


def test_captions_are_framed_cut_and_padded(tokenizer_dir: str) -> None:
    """Check for RoBERTa's ids; captions that are too long keep their end token."""
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    long = "a loud tone and " * 20
    (first, short, cut), mask = tokenize(["a loud tone", "a", long], tokenizer, 10)
    assert first.dtype == mask.dtype == torch.int64
    assert mask.shape == (3, 10)
    length = int(mask[0].sum())
    assert mask[0].tolist() == [1] * length + [0] * (10 - length)
    assert (first[0], first[length - 1], first[length:].tolist()) == (0, 2, [1] * (10 - length))
    assert tokenizer.decode(first[1 : length - 1].tolist()) == "a loud tone"
    assert (short[:3].tolist()[::2], short[3:].tolist(), int(mask[1].sum())) == ([0, 2], [1] * 7, 3)
    assert cut.tolist() == [*tokenize([long], tokenizer, 400)[0][0, :9].tolist(), 2]


@pytest.mark.parametrize("caption", ["</s> a <s><mask>", "🔔 鐘の音 café\n"])
def test_every_script_and_what_looks_like_a_special_token_is_text(
    tokenizer_dir: str, caption: str
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    input_ids, mask = tokenize([caption], tokenizer, 64)
    words = input_ids[0, 1 : int(mask.sum()) - 1].tolist()
    assert min(words) >= len(SPECIAL_TOKENS)
    assert tokenizer.decode(words) == caption


def test_tokenizers_that_do_not_fit_or_are_not_there_are_refused(
    tokenizer_dir: str, tmp_path: Path
) -> None:
    size = len(AutoTokenizer.from_pretrained(tokenizer_dir))
    load_tokenizer(tokenizer_dir, vocab_size=size)
    other = AutoTokenizer.from_pretrained(tokenizer_dir)
    other.pad_token = "<unk>"
    other.save_pretrained(tmp_path / "other")
    for name, vocab_size, message in (
        (tokenizer_dir, size - 1, f"ids up to {size - 1} .* below {size - 1}"),
        (str(tmp_path / "other"), 512, "pads with 3; expected .* 1 for padding"),
        (
            "data/my/tokenizer",
            512,
            f"no tokenizer 'data/my/tokenizer'.*no such folder.* {Path.cwd()}",
        ),
        (str(tmp_path), 512, "the folder .* holds no tokenizer"),
    ):
        with pytest.raises(ValueError, match=rf"clap\.data\.tokenizer: .*{message}"):
            load_tokenizer(name, vocab_size=vocab_size)
