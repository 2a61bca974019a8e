"""Test the text tower: padding, pooling, and pretrained weights, available or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clap_ds.config.model import TextConfig, load_preset
from clap_ds.model.packed import pack
from clap_ds.model.text import TextTower
from tests.model.reference_clap import MICRO_TEXT

import transformers  # isort: skip

MICRO = load_preset("micro").text


def tower(config: TextConfig = MICRO, **options) -> TextTower:
    torch.manual_seed(0)
    return TextTower(config, **{"dropout": 0.0, "from_hub": False, **options})


def pretrained_folder(path: Path, **changes) -> str:
    config = transformers.RobertaConfig(**{**MICRO_TEXT, "layer_norm_eps": 1e-5, "type_vocab_size": 1, **changes})
    transformers.RobertaModel(config).save_pretrained(path)
    return str(path)


def test_pretrained_weights_come_from_the_named_place(tmp_path: Path) -> None:
    config = MICRO.model_copy(update={"hub_name": pretrained_folder(tmp_path)})
    loaded = tower(config, from_hub=True, dropout=0.2).roberta
    expected = transformers.RobertaModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.state_dict().keys() == expected.keys()
    for found in (loaded, tower(dropout=0.2).roberta):
        of = {kind: [each for each in found.modules() if isinstance(each, kind)] for kind in (nn.Dropout, nn.LayerNorm)}
        assert {each.p for each in of[nn.Dropout]} == {0.2}
        assert {each.eps for each in of[nn.LayerNorm]} == {1e-5}


def test_pretrained_weights_that_do_not_fit_or_cannot_be_had_are_a_clear_error(tmp_path: Path) -> None:
    other = pretrained_folder(tmp_path / "other", num_hidden_layers=1, vocab_size=100)
    transformers.BertModel(transformers.BertConfig(**MICRO_TEXT)).save_pretrained(tmp_path / "bert")
    for name, message in (
        (str(tmp_path / "bert"), r"architecture bert \(expected roberta\)"),
        (other, r"vocab_size 100 \(expected 512\), num_layers 1 \(expected 2\)"),
        ("clap-ds-tests/no-such-checkpoint", "pretrained_text: no weights 'clap-ds-tests/no-such-.*HF_HUB_OFFLINE"),
        ("/no/such/folder", "pretrained_text: no weights '/no/such/folder'; tried: no such folder"),
        (MICRO.hub_name, "hub_name is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            tower(MICRO.model_copy(update={"hub_name": name}), from_hub=True)


@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
@pytest.mark.parametrize("kind", ["Roberta", "Bert"])
def test_each_architecture_is_that_of_transformers_padded_and_packed(tmp_path: Path, kind: str, pooling: str) -> None:
    """Compare with transformers' attention, pooling and gradients in fp64; the tower sums means in fp32."""
    sizes: dict[str, Any] = {**MICRO_TEXT, "layer_norm_eps": 1e-5, "attn_implementation": "eager"}
    if kind == "Roberta":  # like DistilRoBERTa
        sizes |= {"type_vocab_size": 1, "num_hidden_layers": 6}
    theirs = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    for name, parameter in theirs.named_parameters():
        torch.manual_seed(len(name))
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    own = {"architecture": kind.lower(), "hub_name": str(tmp_path), "num_layers": theirs.config.num_hidden_layers}
    config = MICRO.model_copy(update={**own, "pooling": pooling})
    ours, theirs = tower(config, from_hub=True).double(), theirs.double().eval()
    mask = (torch.arange(24) < torch.tensor([24, 3, 17, 2])[:, None]).long()
    ids = torch.randint(5, MICRO.vocab_size, (4, 24)).where(mask.bool(), torch.tensor(theirs.config.pad_token_id))
    output = theirs(input_ids=ids, attention_mask=mask)
    means = (output.last_hidden_state * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    expected = output.pooler_output if pooling == "cls_pooler" else means
    probe = torch.randn(expected.shape, dtype=torch.float64)
    (expected * probe).sum().backward()
    row, packing = pack([(ids[:2], mask[:2]), (ids[2:], mask[2:])], 64)
    assert len(row) == 64
    rounding = 1e-9 if pooling == "cls_pooler" else 2e-6
    for inputs in ((ids, mask), (row, None, packing)):
        ours.zero_grad()
        pooled = ours(*inputs)
        torch.testing.assert_close(pooled, expected, rtol=rounding, atol=rounding)
        (pooled * probe).sum().backward()
        for name, found in ours.roberta.named_parameters():
            wanted = theirs.get_parameter(name).grad
            torch.testing.assert_close(found.grad, wanted, rtol=10 * rounding, atol=10 * rounding, msg=name)
