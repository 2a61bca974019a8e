"""Load, apply and train tokenizers of captions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clap_ds.config.model import PAD_TOKEN_ID
from clap_ds.config.open_clip import PREFIX, open_clip_for
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which is imported where used: it takes seconds)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
else:
    PreTrainedTokenizerBase = Any

FIELD = "clap.data.tokenizer"
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # ids 0 to 4; RoBERTa has 0 to 3
SMALL_VOCAB_SIZE = 512


def load_tokenizer(
    name_or_dir: str, *, vocab_size: int, pad_token_id: int = PAD_TOKEN_ID, field: str = FIELD
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, the local Hub cache or the Hub. Raises ValueError, with
    `field`, if it isn't found or its ids or padding don't fit the model."""
    if name_or_dir.startswith(PREFIX):
        return OpenClipTokenizer(name_or_dir)  # type: ignore[return-value]
    from transformers import AutoTokenizer

    from clap_ds.weights.hub import load_by_name

    def load(local_files_only: bool) -> PreTrainedTokenizerBase:
        # By default transformers prompts for trust_remote_code.
        return AutoTokenizer.from_pretrained(
            name_or_dir, local_files_only=local_files_only, trust_remote_code=False
        )

    tokenizer = load_by_name(name_or_dir, load, field=field, what="tokenizer")
    # len() also counts added tokens, but not gaps between ids.
    largest_id = max([len(tokenizer) - 1, *tokenizer.get_vocab().values()])
    if largest_id >= vocab_size or tokenizer.pad_token_id != pad_token_id:
        found = f"has ids up to {largest_id} and pads with {tokenizer.pad_token_id}"
        expected = f"the tokenizer of clap.model.preset, with ids below {vocab_size} and {pad_token_id} for padding"
        raise ValueError(f"{field}: {name_or_dir!r} {found}; expected {expected}")
    return tokenizer


class OpenClipTokenizer:
    """The tokenizer of a model of open_clip, with the part of a `transformers` tokenizer's
    interface that is used here."""

    def __init__(self, name: str) -> None:
        self.name_or_path = name
        with open_clip_for(name) as open_clip:
            self._tokenizer = open_clip.get_tokenizer(name.removeprefix(PREFIX))
        self.pad_token_id = getattr(self._tokenizer, "pad_token_id", None) or 0

    def __call__(
        self, captions: list[str], max_length: int | None = None, **_: Any
    ) -> dict[str, list[list[int]]]:
        """Return token ids of captions, cut after `max_length`, without padding."""
        rows = self._tokenizer(captions, context_length=max_length)
        lengths = (
            ((rows != self.pad_token_id) * torch.arange(1, rows.shape[1] + 1)).amax(dim=1).tolist()
        )
        return {
            "input_ids": [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
        }


def tokenize(
    captions: list[str], tokenizer: PreTrainedTokenizerBase, context_length: int
) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, both (B, context_length) int64: <s> … </s> (BERT: [CLS]
    … [SEP]), then padding.

    Long captions are truncated before </s>. Words that look like special tokens are plain text.
    """
    cut: dict[str, Any] = {
        "truncation": True,
        "max_length": context_length,
        "return_attention_mask": False,
    }
    rows: Any = tokenizer(captions, **cut, split_special_tokens=True)["input_ids"]
    is_real = torch.arange(context_length) < torch.tensor(list(map(len, rows)))[:, None]
    # Three times as fast as the tokenizer's padding.
    ids = torch.full((len(rows), context_length), int(tokenizer.pad_token_id))
    ids[is_real] = torch.tensor(list(chain.from_iterable(rows)))
    return ids, is_real.long()


def train_tokenizer(
    captions: Iterable[str], directory: Path, *, vocab_size: int = SMALL_VOCAB_SIZE
) -> int:
    """Train a byte-level BPE of at most `vocab_size` tokens with RoBERTa's special ids, save it for
    `load_tokenizer` and return its size."""
    from tokenizers.implementations import ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        iter(captions),
        vocab_size,
        min_frequency=0,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS],
    )
    bpe.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = (
        "bos_token",
        "pad_token",
        "eos_token",
        "unk_token",
        "mask_token",
        "cls_token",
        "sep_token",
    )
    special = dict(zip(names, (*SPECIAL_TOKENS, "<s>", "</s>"), strict=True))
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **special).save_pretrained(directory)
    return bpe.get_vocab_size()
