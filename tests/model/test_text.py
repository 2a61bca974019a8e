"""The text tower: padding, pooling, and pretrained weights that can or can't be had."""

from pathlib import Path

import pytest
import torch

from clap_ds.config.model import TextConfig, load_preset
from clap_ds.model.text import TextTower
from clap_ds.model.text_attention import NAME
from tests.model.reference_clap import MICRO_TEXT, captions

import transformers  # isort: skip

MICRO = load_preset("micro").text


def tower(config: TextConfig = MICRO, **options) -> TextTower:
    torch.manual_seed(0)
    return TextTower(config, **{"dropout": 0.0, "from_hub": False, **options})


@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
def test_padding_changes_nothing_and_no_mask_is_a_mask_of_ones(pooling: str) -> None:
    model = tower(MICRO.model_copy(update={"pooling": pooling}))
    assert (model.roberta.pooler is None) == (pooling == "mean"), "nothing is left unused"
    input_ids, mask = captions(4, 24, MICRO.vocab_size, seed=0)
    pooled = model(input_ids, mask)
    assert pooled.shape == (4, 32)
    for row, expected in enumerate(pooled):
        own = slice(row, row + 1), slice(int(mask[row].sum()))
        for each in (None, mask[own]):
            torch.testing.assert_close(model(input_ids[own], each)[0], expected, rtol=1e-4, atol=1e-5)


def pretrained_folder(path: Path, **changes) -> str:
    config = transformers.RobertaConfig(**{**MICRO_TEXT, "layer_norm_eps": 1e-5, "type_vocab_size": 1, **changes})
    transformers.RobertaModel(config).save_pretrained(path)
    return str(path)


def test_pretrained_weights_come_from_the_named_place(tmp_path: Path) -> None:
    config = MICRO.model_copy(update={"hub_name": pretrained_folder(tmp_path)})
    loaded = tower(config, from_hub=True, dropout=0.2).roberta
    expected = transformers.RobertaModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    for found in (loaded.config, tower(dropout=0.2).roberta.config):
        assert found._attn_implementation == NAME
        assert found.hidden_dropout_prob == found.attention_probs_dropout_prob == 0.2
        assert found.layer_norm_eps == 1e-5


def test_pretrained_weights_that_do_not_fit_or_cannot_be_had_are_a_clear_error(tmp_path: Path) -> None:
    other = pretrained_folder(tmp_path, num_hidden_layers=1, vocab_size=100)
    for name, message in (
        (other, r"vocab_size 100 \(expected 512\), num_layers 1 \(expected 2\)"),
        ("clap-ds-tests/no-such-checkpoint", "text_from_hub: no weights 'clap-ds-tests/no-such-.*HF_HUB_OFFLINE"),
        ("/no/such/folder", "text_from_hub: no weights '/no/such/folder'; tried: no such folder"),
        (MICRO.hub_name, "hub_name is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            tower(MICRO.model_copy(update={"hub_name": name}), from_hub=True)
