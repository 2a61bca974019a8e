"""The text tower: padding, pooling, and pretrained weights that can or can't be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clap_ds.config.model import TextConfig, load_preset
from clap_ds.model.text import TextTower
from tests.model.reference_clap import MICRO_TEXT, captions

import transformers  # isort: skip

MICRO = load_preset("micro").text


def tower(config: TextConfig = MICRO, **options) -> TextTower:
    torch.manual_seed(0)
    return TextTower(config, **{"dropout": 0.0, "from_hub": False, **options})


@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
def test_padding_changes_nothing(pooling: str) -> None:
    model = tower(MICRO.model_copy(update={"pooling": pooling}))
    input_ids, mask = captions(4, 24, MICRO.vocab_size, seed=0)
    pooled = model(input_ids, mask)
    assert pooled.shape == (4, 32)
    for row in range(4):
        length = int(mask[row].sum())
        torch.testing.assert_close(model(input_ids[row : row + 1, :length], None)[0], pooled[row], rtol=1e-4, atol=1e-5)


def test_no_mask_is_a_mask_of_ones() -> None:
    input_ids, mask = captions(1, 24, MICRO.vocab_size, seed=1)
    assert mask.all()
    torch.testing.assert_close(tower()(input_ids, None), tower()(input_ids, mask), rtol=1e-5, atol=1e-6)


def test_mean_pooling_has_no_pooler_to_leave_unused() -> None:
    assert tower(MICRO.model_copy(update={"pooling": "mean"})).roberta.pooler is None
    assert tower().roberta.pooler is not None


def test_attention_is_the_fused_kernel_and_dropout_is_set() -> None:
    config = tower(dropout=0.3).roberta.config
    assert config._attn_implementation == "sdpa"
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.3
    assert config.layer_norm_eps == 1e-5


def pretrained_folder(path: Path, **changes) -> str:
    config = transformers.RobertaConfig(**{**MICRO_TEXT, "layer_norm_eps": 1e-5, "type_vocab_size": 1, **changes})
    transformers.RobertaModel(config).save_pretrained(path)
    return str(path)


def test_pretrained_weights_come_from_the_named_place(tmp_path: Path) -> None:
    config = MICRO.model_copy(update={"hub_name": pretrained_folder(tmp_path)})
    loaded = tower(config, from_hub=True, dropout=0.2).roberta
    expected = transformers.RobertaModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.config.hidden_dropout_prob == 0.2
    assert loaded.config._attn_implementation == "sdpa"


def test_pretrained_weights_of_other_sizes_are_refused(tmp_path: Path) -> None:
    config = MICRO.model_copy(update={"hub_name": pretrained_folder(tmp_path, num_hidden_layers=1, vocab_size=100)})
    with pytest.raises(ValueError, match=r"vocab_size 100 \(expected 512\), num_layers 1 \(expected 2\)"):
        tower(config, from_hub=True)


@pytest.mark.parametrize("name", ["clap-ds-tests/no-such-checkpoint", "/no/such/folder"])
def test_pretrained_weights_that_cannot_be_had_are_a_clear_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"text_from_hub: can't get '{name}'"):
        tower(MICRO.model_copy(update={"hub_name": name}), from_hub=True)


def test_a_preset_without_a_hub_name_has_no_pretrained_weights() -> None:
    with pytest.raises(ValueError, match="hub_name is empty"):
        tower(from_hub=True)
