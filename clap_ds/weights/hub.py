"""Pretrained text towers and tokenizers of `transformers`, by name.

`load_by_name` searches a folder, the local Hub cache and the Hub, in this order. `transformers`
itself contacts the Hub first and hangs if a firewall drops packets. Here the Hub comes last, and
only if it answers within a time limit.

`load_tokenizer`, `tokenize` and `train_tokenizer` are for captions. A tokenizer must have the text
tower's token ids and padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub import constants, get_session
from tokenizers.implementations import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from torch import Tensor

from clap_ds.config.model import LIKE_ROBERTA, PAD_TOKEN_ID, TextConfig
from clap_ds.config.model_names import list_presets
from clap_ds.config.open_clip_config import PREFIX, import_open_clip
from clap_ds.config.transformers_config import TEXT
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio if installed)
from clap_ds.utils.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:
    PreTrainedTokenizerBase = Any

T = TypeVar("T")

TEXT_FIELD = "clap.model.pretrained_text"
TOKENIZER_FIELD = "clap.data.tokenizer"
# Time limit of the Hub's first answer.
HUB_TIMEOUT_S = 4.0
OFFLINE_HELP = (
    "Without a network, name a local folder, or set HF_HOME to a cache folder that contains it, and HF_HUB_OFFLINE=1."
    " With one, this fills the cache: hf download"
)
# Of `hf download`, because repositories also have weights in other formats.
TOKENIZER_FILES = ("*.json", "*.model", "*.txt")
WEIGHT_FILES = ("*.json", "*.safetensors")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
BUILT_IN = (
    "FacebookAI/roberta-base", "roberta-base", "FacebookAI/xlm-roberta-base", "intfloat/multilingual-e5-base",
    "intfloat/multilingual-e5-small", *list_presets(),
)  # fmt: skip
# Of trained tokenizers, with ids 0 to 4. RoBERTa has the first four.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SMALL_VOCAB_SIZE = 512


def _import_transformers() -> Any:
    """Import transformers, which takes seconds."""
    import transformers

    return transformers


def check_recorded(name: str, where: object, option: str) -> str:
    """Return the name of a tokenizer or model that a file of unknown origin states.

    Raises ValueError, with the option that accepts any name, unless the name is built in, one of
    open_clip's own models, or a Hub name that this host's cache has.
    """
    cache_folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    is_cached = HUB_NAME.fullmatch(name) and cache_folder.is_dir()
    is_open_clip = re.fullmatch(PREFIX + r"[\w.-]+", name)
    if name in BUILT_IN or is_cached or is_open_clip:
        return name
    raise ValueError(
        f"{where} names {name!r}, which could be any place: if you trust it, pass {option} {name}"
    )


def load_by_name(name: str, load: Callable[[bool], T], *, field: str, kind: str) -> T:
    """Return `load(local_files_only)`, a `from_pretrained` of transformers, from the first place
    that has `name`.

    Raises ValueError, with `field`, `kind` and the places searched, if `name` isn't found or can't
    be loaded.
    """
    folder = Path(name)
    # Otherwise transformers contacts the Hub, for 3 s or more.
    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        return load(True)
    except Exception as error:  # a damaged folder raises various errors
        if folder.is_dir():
            reason = f"holds no {kind} transformers can load: {first_line(error)}"
            raise ValueError(f"{field}: the folder {name!r} {reason}") from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline

    searched = f"no such folder in {Path.cwd()}"
    if HUB_NAME.fullmatch(name):
        try:
            # Any answer will do: a firewall that drops packets gives none.
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
            return load(False)
        except Exception as error:  # the HTTP package raises various errors
            patterns = TOKENIZER_FILES if kind == "tokenizer" else WEIGHT_FILES
            options = "".join(f" --include '{pattern}'" for pattern in patterns)
            problem = f"{constants.ENDPOINT}: {first_line(error)}. {OFFLINE_HELP} {name}{options}"
        searched += f"; not in the Hub's local cache, {constants.HF_HUB_CACHE}; the Hub, {problem}"
    raise ValueError(f"{field}: no {kind} {name!r}; tried: {searched}")


def load_pretrained_text(config: TextConfig) -> PreTrainedModel:
    """Load `transformers`' encoder named `config.hub_name`.

    Raises ValueError if it is unavailable or its architecture or sizes differ.
    """
    if not config.hub_name:
        raise ValueError(
            f"{TEXT_FIELD}: this preset's text tower has no pretrained checkpoint (its hub_name is empty)"
        )

    def load(local_files_only: bool) -> PreTrainedModel:
        return _import_transformers().AutoModel.from_pretrained(
            config.hub_name, add_pooling_layer=config.pooling == "cls_pooler", local_files_only=local_files_only,
            dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip

    model = load_by_name(config.hub_name, load, field=TEXT_FIELD, kind="weights")
    expected = {name: getattr(config, field) for field, name in TEXT.items()}
    expected["model_type"] = config.architecture
    if config.architecture == "roberta" and model.config.model_type in LIKE_ROBERTA:
        expected["model_type"] = model.config.model_type
    expected |= {"layer_norm_eps": config.layer_norm_eps, "hidden_act": "gelu"}
    problems = []
    for name, value in expected.items():
        actual = getattr(model.config, name, None)
        if actual != value:
            problems.append(f"{name} {actual} (expected {value})")
    if problems:
        raise ValueError(
            f"{TEXT_FIELD}: {config.hub_name!r} doesn't match this preset: {', '.join(problems)}"
        )
    return model


class OpenClipTokenizer:
    """The tokenizer of a model of open_clip, with the part of a `transformers` tokenizer's
    interface that is used here."""

    def __init__(self, name: str) -> None:
        with import_open_clip(name) as open_clip:
            self._tokenizer = open_clip.get_tokenizer(name.removeprefix(PREFIX))
        self.pad_token_id = getattr(self._tokenizer, "pad_token_id", None) or 0

    def __call__(
        self, captions: list[str], max_length: int | None = None, **_: Any
    ) -> dict[str, list[list[int]]]:
        """Return token ids of captions, cut after `max_length`, without padding."""
        input_ids = []
        for row in self._tokenizer(captions, context_length=max_length):
            # Padding only follows the last token that is not padding.
            (positions,) = torch.nonzero(row != self.pad_token_id, as_tuple=True)
            length = int(positions.max()) + 1 if len(positions) else 0
            input_ids.append(row[:length].tolist())
        return {"input_ids": input_ids}


def load_tokenizer(
    name: str, *, vocab_size: int, pad_token_id: int = PAD_TOKEN_ID, field: str = TOKENIZER_FIELD
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, the local Hub cache or the Hub.

    Raises ValueError, with `field`, if it isn't found or its ids or padding don't fit the model.
    """
    if name.startswith(PREFIX):
        return OpenClipTokenizer(name)  # type: ignore[return-value]

    def load(local_files_only: bool) -> PreTrainedTokenizerBase:
        # By default transformers prompts for trust_remote_code.
        return _import_transformers().AutoTokenizer.from_pretrained(
            name, local_files_only=local_files_only, trust_remote_code=False
        )

    tokenizer = load_by_name(name, load, field=field, kind="tokenizer")
    # len() also counts added tokens, but not gaps between ids.
    largest_id = max([len(tokenizer) - 1, *tokenizer.get_vocab().values()])
    if largest_id >= vocab_size or tokenizer.pad_token_id != pad_token_id:
        actual = f"has ids up to {largest_id} and pads with {tokenizer.pad_token_id}"
        expected = f"the tokenizer of clap.model.preset, with ids below {vocab_size} and {pad_token_id} for padding"
        raise ValueError(f"{field}: {name!r} {actual}; expected {expected}")
    return tokenizer


def tokenize(
    captions: list[str],
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    prefix: str = "",
) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, both (B, context_length) int64, of captions behind the
    model's `caption_prefix`.

    A row is <s> … </s> (BERT: [CLS] … [SEP]), then padding. Long captions are truncated before
    </s>. Parts of captions that look like special tokens are plain text, except with XLM-RoBERTa's
    tokenizer, whose vocabulary has them as pieces.
    """
    options: Any = {"truncation": True, "return_attention_mask": False}
    texts = [prefix + caption for caption in captions]
    rows: Any = tokenizer(texts, max_length=context_length, split_special_tokens=True, **options)[
        "input_ids"
    ]
    lengths_B1 = torch.tensor([len(row) for row in rows])[:, None]
    is_token_BL = torch.arange(context_length) < lengths_B1
    # Three times as fast as the tokenizer's padding.
    ids_BL = torch.full((len(rows), context_length), int(tokenizer.pad_token_id))
    ids_BL[is_token_BL] = torch.tensor([*chain.from_iterable(rows)])
    return ids_BL, is_token_BL.long()


def train_tokenizer(
    captions: Iterable[str], directory: Path, *, vocab_size: int = SMALL_VOCAB_SIZE
) -> int:
    """Train a byte-level BPE of at most `vocab_size` tokens with RoBERTa's special ids.

    Save it for `load_tokenizer`, and return its size.
    """
    bpe = ByteLevelBPETokenizer()
    options: Any = {"min_frequency": 0, "show_progress": False}
    bpe.train_from_iterator(iter(captions), vocab_size, special_tokens=[*SPECIAL_TOKENS], **options)
    bpe.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer = _import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<s>",
        sep_token="</s>",
    )
    tokenizer.save_pretrained(directory)
    return bpe.get_vocab_size()
