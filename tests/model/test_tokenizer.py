from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from clap_ds.model.tokenizer import SPECIAL_TOKENS, load_tokenizer, tokenize, train_tokenizer


def test_captions_are_framed_and_padded(tokenizer_dir: str) -> None:
    """By RoBERTa's ids."""
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    input_ids, mask = tokenize(["a loud tone", "a"], tokenizer, 10)
    assert input_ids.dtype == mask.dtype == torch.int64
    assert input_ids.shape == mask.shape == (2, 10)
    for ids, row_mask in zip(input_ids.tolist(), mask.tolist(), strict=True):
        length = sum(row_mask)
        assert row_mask == [1] * length + [0] * (10 - length)
        assert (ids[0], ids[length - 1]) == (0, 2)
        assert ids[length:] == [1] * (10 - length)
    assert tokenizer.decode(input_ids[0].tolist(), skip_special_tokens=True) == "a loud tone"
    assert mask[1].sum() == 3


def test_long_captions_keep_their_end_token(tokenizer_dir: str) -> None:
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    input_ids, mask = tokenize(["a loud tone and " * 20], tokenizer, 9)
    whole = tokenize(["a loud tone and " * 20], tokenizer, 400)[0][0].tolist()
    assert input_ids[0].tolist() == [*whole[:8], 2]
    assert mask.sum() == 9


@pytest.mark.parametrize("caption", ["a <pad> tone", "</s> a <s><mask>", "<unk>", "колокольчик", "🔔 鐘の音", "café\n"])
def test_every_script_and_what_looks_like_a_special_token_is_text(tokenizer_dir: str, caption: str) -> None:
    tokenizer = load_tokenizer(tokenizer_dir, vocab_size=512)
    input_ids, mask = tokenize([caption], tokenizer, 64)
    words = input_ids[0, 1 : int(mask.sum()) - 1].tolist()
    assert min(words) >= len(SPECIAL_TOKENS)
    assert tokenizer.decode(words) == caption


def test_tokenizers_that_do_not_fit_or_are_not_there_are_refused(tokenizer_dir: str, tmp_path: Path) -> None:
    size = len(AutoTokenizer.from_pretrained(tokenizer_dir))
    load_tokenizer(tokenizer_dir, vocab_size=size)
    other = AutoTokenizer.from_pretrained(tokenizer_dir)
    other.pad_token = "<unk>"
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{ not json")
    for name, vocab_size, message in (
        (tokenizer_dir, size - 1, f"ids up to {size - 1}, .* vocabulary of {size - 1}"),
        (str(tmp_path / "other"), 512, "pads with id 3; expected .* 1"),
        ("data/my/tokenizer", 512, f"no tokenizer 'data/my/tokenizer'.*no such folder.* {Path.cwd()}"),
        (str(tmp_path), 512, "the folder .* holds no tokenizer"),
        (str(tmp_path / "damaged"), 512, "the folder .* holds no tokenizer"),
    ):
        with pytest.raises(ValueError, match=rf"clap\.data\.tokenizer: .*{message}"):
            load_tokenizer(name, vocab_size=vocab_size)


def test_training_is_deterministic_and_bounded(tmp_path: Path) -> None:
    captions = [f"sound {number} of {number * 7919 % 1000} bells and {number % 7} clicks" for number in range(400)]
    for name in ("first", "second"):
        train_tokenizer(captions, tmp_path / name, vocab_size=300)
    assert (tmp_path / "first/tokenizer.json").read_text() == (tmp_path / "second/tokenizer.json").read_text()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "first")) == 300
