from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from clap_ds.weights.tokenizer import SPECIAL_TOKENS, load_tokenizer, tokenize


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
