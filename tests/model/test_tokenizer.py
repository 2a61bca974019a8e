"""Tokenizers: RoBERTa's ids, what is cut and padded, and those that can't be had or don't fit."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from clap_ds.model.tokenizer import SPECIAL_TOKENS, load_tokenizer, tokenize, train_tokenizer


def test_captions_are_framed_cut_and_padded(tokenizer_dir: str) -> None:
    """By RoBERTa's ids; long ones keep their end token."""
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    long = "a loud tone and " * 20
    whole = tokenize([long], tokenizer, 400)[0][0].tolist()
    input_ids, mask = tokenize(["a loud tone", "a", long], tokenizer, 9)
    assert input_ids.dtype == mask.dtype == torch.int64
    assert input_ids.shape == mask.shape == (3, 9)
    for ids, row_mask in zip(input_ids.tolist(), mask.tolist(), strict=True):
        length = sum(row_mask)
        assert row_mask == [1] * length + [0] * (9 - length)
        assert (ids[0], ids[length - 1]) == (0, 2)
        assert ids[length:] == [1] * (9 - length)
    assert tokenizer.decode(input_ids[0].tolist(), skip_special_tokens=True) == "a loud tone"
    assert mask[1].sum() == 3
    assert input_ids[2].tolist() == [*whole[:8], 2]


@pytest.mark.parametrize("caption", ["a <pad> tone", "</s> a <s><mask>", "<unk>", "🔔 鐘の音", "café\n"])
def test_every_script_and_what_looks_like_a_special_token_is_text(tokenizer_dir: str, caption: str) -> None:
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    input_ids, mask = tokenize([caption], tokenizer, 64)
    words = input_ids[0, 1 : int(mask.sum()) - 1].tolist()
    assert min(words) >= len(SPECIAL_TOKENS)
    assert tokenizer.decode(words) == caption


def test_tokenizers_that_do_not_fit_are_refused(tokenizer_dir: str, tmp_path: Path) -> None:
    other = AutoTokenizer.from_pretrained(tokenizer_dir)
    size = len(other)
    load_tokenizer(tokenizer_dir, vocab_size=size)
    message = rf"clap\.data\.tokenizer: .*ids up to {size - 1}, .* vocabulary of {size - 1}"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tokenizer_dir, vocab_size=size - 1)
    other.pad_token = "<unk>"
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a\.field: .*pads with id 3; expected .* 1"):
        load_tokenizer(str(tmp_path), vocab_size=512, field="a.field")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "data/my/tokenizer"])
def test_missing_folder_names_the_working_folder(name: str) -> None:
    with pytest.raises(ValueError, match=rf"clap\.data\.tokenizer: no tokenizer '{name}'.*no such folder") as error:
        load_tokenizer(name, vocab_size=512)
    assert str(Path.cwd()) in str(error.value)
    assert "hub" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{ not json"])
def test_folder_without_a_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"clap\.data\.tokenizer: the folder .* holds no tokenizer"):
        load_tokenizer(str(tmp_path), vocab_size=512)


def test_training_is_deterministic_and_bounded(tmp_path: Path) -> None:
    captions = [f"sound {number} of {number * 7919 % 1000} bells and {number % 7} clicks" for number in range(400)]
    for name in ("first", "second"):
        assert train_tokenizer(captions, tmp_path / name, vocab_size=300) == 300
    assert (tmp_path / "first/tokenizer.json").read_text() == (tmp_path / "second/tokenizer.json").read_text()
