"""Captions to token ids: loading a tokenizer, using it, and training a small one.

The trained one is for the sounds this project makes itself and for tests; it needs no hub and its vocabulary fits the `micro`
preset.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clap_ds.config.files import MOST_BYTES
from clap_ds.config.model import PAD_TOKEN_ID
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which takes seconds: where it is used)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
else:
    PreTrainedTokenizerBase = Any

FIELD = "clap.data.tokenizer"
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # ids 0 to 4; RoBERTa's own are 0 to 3
SMALL_VOCAB_SIZE = 512
_PADS_WITH = {0: "as BERT's do", PAD_TOKEN_ID: "as RoBERTa's do"}


def load_tokenizer(
    name_or_dir: str, *, vocab_size: int, pad_token_id: int = PAD_TOKEN_ID, field: str = FIELD
) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, in the hub's local cache, or on the hub: the first of these that has it.

    Args:
        vocab_size, pad_token_id: of the model that will take the ids.
        field: of the settings, for messages.

    Raises:
        ValueError: not found (says where it looked), or it doesn't fit the model: ids beyond `vocab_size`, or padding other
            than the model's.
    """

    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    from clap_ds.model.hub import load_by_name

    def load(local_files_only: bool) -> PreTrainedTokenizerBase:
        no_code = {"trust_remote_code": False}  # of the repository: by default transformers asks on the terminal
        for file in (path for ending in ("json", "txt", "jinja") for path in Path(name_or_dir).glob(f"*.{ending}")):
            if file.stat().st_size > MOST_BYTES:
                raise ValueError(f"{file.name} has more than {MOST_BYTES:,} bytes")
        found = AutoTokenizer.from_pretrained(name_or_dir, local_files_only=local_files_only, **no_code)
        if not isinstance(found, PreTrainedTokenizerBase):  # but one of tokenizers, say
            raise ValueError(f"{type(found).__name__} is none")
        return found

    tokenizer = load_by_name(name_or_dir, load, field=field, what="tokenizer")
    # len() also counts added tokens, but not gaps between ids.
    largest_id = max([len(tokenizer) - 1, *tokenizer.get_vocab().values()])
    if largest_id >= vocab_size:
        raise ValueError(
            f"{field}: {name_or_dir!r} has token ids up to {largest_id}, the model a vocabulary of {vocab_size}; "
            "expected the tokenizer that belongs to clap.model.preset, or a smaller one"
        )
    if (pad := tokenizer.pad_token_id) != pad_token_id:
        theirs, ours = (f"{each}, {_PADS_WITH[each]}" if each in _PADS_WITH else each for each in (pad, pad_token_id))
        raise ValueError(f"{field}: {name_or_dir!r} pads with id {theirs}; expected the text tower's, {ours}")
    return tokenizer


def tokenize(captions: list[str], tokenizer: PreTrainedTokenizerBase, text_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (B, text_tokens) int64: <s> … </s> (BERT: [CLS] … [SEP]), then padding.

    Captions that are too long lose their last words, never </s>. Words that look like special tokens are taken as plain text.
    """
    cut: dict[str, Any] = {"truncation": True, "max_length": text_tokens, "return_attention_mask": False}
    rows: Any = tokenizer(captions, **cut, split_special_tokens=True)["input_ids"]
    is_real = torch.arange(text_tokens) < torch.tensor(list(map(len, rows)))[:, None]
    ids = torch.full(
        (len(rows), text_tokens), int(tokenizer.pad_token_id)
    )  # by hand: three times as quick as by the tokenizer
    ids[is_real] = torch.tensor(list(chain.from_iterable(rows)))
    return ids, is_real.long()


def train_tokenizer(captions: Iterable[str], directory: Path, *, vocab_size: int = SMALL_VOCAB_SIZE) -> int:
    """Trains a byte-level BPE with RoBERTa's special ids, saves it where `load_tokenizer` can load it, and returns its size.

    Args:
        vocab_size: upper bound; at least the 256 bytes and the special tokens.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    assert vocab_size >= 256 + len(SPECIAL_TOKENS)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(captions, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token", "cls_token", "sep_token")
    special = dict(zip(names, (*SPECIAL_TOKENS, "<s>", "</s>"), strict=True))
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(directory)
    return bpe.get_vocab_size()
