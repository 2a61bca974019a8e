"""Load `transformers` models from a folder, the local Hub cache or the Hub, in this order.

`transformers` itself contacts the Hub first and hangs if a firewall drops packets. Here the Hub
comes last, and only if it answers within a time limit.

Load, apply and train tokenizers of captions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub import constants, get_session
from torch import Tensor

from clap_ds.config.model import PAD_TOKEN_ID, TextConfig
from clap_ds.config.model_names import preset_names
from clap_ds.config.open_clip_config import PREFIX, open_clip_for
from clap_ds.config.transformers_config import TEXT
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio if installed)
from clap_ds.utils.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:
    PreTrainedTokenizerBase = Any


TEXT_FIELD = "clap.model.pretrained_text"

ANSWER_S = 4.0
"""Time limit of the Hub's first answer, in seconds."""
OFFLINE = "Without a network, name a local folder, or set HF_HOME to a cache folder that contains it, and HF_HUB_OFFLINE=1"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

T = TypeVar("T")
BUILT_IN = ("FacebookAI/roberta-base", "roberta-base", *preset_names())


def check_recorded(name: str, where: object, option: str) -> str:
    """Return the name of a tokenizer or model that a file of others states. Raises ValueError, with
    the option that accepts any name, unless it is built in, one of open_clip's own models, or a Hub
    name that this host's cache has."""
    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    is_cached = HUB_NAME.fullmatch(name) and cached.is_dir()
    if name in BUILT_IN or is_cached or re.fullmatch(PREFIX + r"[\w.-]+", name):
        return name
    raise ValueError(
        f"{where} names {name!r}, which could be any place: if you trust it, pass {option} {name}"
    )


def load_by_name(name: str, load: Callable[[bool], T], *, field: str, what: str) -> T:
    """Return `load(local_files_only)`, a `from_pretrained` of transformers, from the first place
    that has `name`.

    Raises ValueError, with `field`, `what` and the places searched, if `name` isn't found or can't
    be loaded.
    """
    folder = Path(name)
    # Otherwise transformers contacts the Hub, for 3 s or more.
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        return load(True)
    except Exception as error:  # a damaged folder raises various errors
        if folder.is_dir():
            reason = f"holds no {what} transformers can load: {first_line(error)}"
            raise ValueError(f"{field}: the folder {name!r} {reason}") from error
    finally:
        constants.HF_HUB_OFFLINE = before
    tried = f"no such folder in {Path.cwd()}"
    if HUB_NAME.fullmatch(name):
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
            return load(False)
        except Exception as error:  # the HTTP package raises various errors
            problem = f"{constants.ENDPOINT}: {first_line(error)}. {OFFLINE}"
        tried += f"; not in the Hub's local cache, {constants.HF_HUB_CACHE}; the Hub, {problem}"
    raise ValueError(f"{field}: no {what} {name!r}; tried: {tried}")


def pretrained_text(config: TextConfig) -> PreTrainedModel:
    """Load `transformers`' encoder named `config.hub_name`. Raises ValueError if it is unavailable
    or its architecture or sizes differ."""
    if not config.hub_name:
        raise ValueError(
            f"{TEXT_FIELD}: this preset's text tower has no pretrained checkpoint (its hub_name is empty)"
        )
    from transformers import AutoModel

    def load(local_files_only: bool) -> PreTrainedModel:
        return AutoModel.from_pretrained(
            config.hub_name, add_pooling_layer=config.pooling == "cls_pooler", local_files_only=local_files_only,
            dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip

    model: PreTrainedModel = load_by_name(config.hub_name, load, field=TEXT_FIELD, what="weights")
    expected: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in TEXT.items()}
    expected |= {
        "model_type": config.architecture,
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_act": "gelu",
    }
    found = {name: getattr(model.config, name, None) for name in expected}
    if wrong := [
        f"{name} {found[name]} (expected {value})"
        for name, value in expected.items()
        if found[name] != value
    ]:
        raise ValueError(
            f"{TEXT_FIELD}: {config.hub_name!r} doesn't match this preset: {', '.join(wrong)}"
        )
    return model


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

    pass

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
