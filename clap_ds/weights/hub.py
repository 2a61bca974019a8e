"""Load `transformers` models from a folder, the local Hub cache or the Hub, in this order.

`transformers` itself contacts the Hub first and hangs if a firewall drops packets. Here the Hub comes last, and only if it
answers within a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub import constants, get_session

from clap_ds.config.clap_json import TEXT
from clap_ds.config.model import TextConfig
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio if installed)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT_FIELD = "clap.model.pretrained_text"
_SIZES = TEXT | {"layer_norm_eps": "layer_norm_eps"}

ANSWER_S = 4.0
"""Time limit of the Hub's first answer, in seconds."""
OFFLINE = (
    "Without a network, name a local folder, or set HF_HOME to a cache folder that contains it, and HF_HUB_OFFLINE=1"
)

T = TypeVar("T")


def load_by_name(name: str, load: Callable[[bool], T], *, field: str, what: str) -> T:
    """Return `load(local_files_only)`, a `from_pretrained` of transformers, from the first place that has `name`.

    Raises ValueError, with `field`, `what` and the places searched, if `name` isn't found or can't be loaded.
    """
    folder = Path(name)
    try:
        with _offline():
            return load(True)
    except Exception as error:  # a damaged folder raises various errors
        if folder.is_dir():
            reason = f"holds no {what} transformers can load: {_first_line(error)}"
            raise ValueError(f"{field}: the folder {name!r} {reason}") from error
    tried = f"no such folder in {Path.cwd()}"
    if not (folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2):
        problem = problem_with_hub()
        if problem is None:
            try:
                return load(False)
            except (OSError, ValueError) as error:
                problem = _first_line(error)
        else:
            problem += f". {OFFLINE}"
        tried += f"; not in the hub's local cache, {constants.HF_HUB_CACHE}; the hub: {problem}"
    raise ValueError(f"{field}: no {what} {name!r}; tried: {tried}")


@contextmanager
def _offline() -> Iterator[None]:
    """Act as with HF_HUB_OFFLINE=1: with `local_files_only` alone, transformers still contacts the Hub for 3 s or more."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def problem_with_hub() -> str | None:
    """Return why the Hub can't be contacted, or None if it answers, even with an error."""
    if constants.HF_HUB_OFFLINE:
        return "not contacted because HF_HUB_OFFLINE=1 is set"
    try:
        ThreadPoolExecutor(1).submit(get_session().head, constants.ENDPOINT, timeout=ANSWER_S).result(2 * ANSWER_S)
    except Exception as error:  # the HTTP package raises various errors
        return f"{constants.ENDPOINT} can't be reached ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def pretrained_text(config: TextConfig) -> PreTrainedModel:
    """Load `transformers`' encoder named `config.hub_name`. Raises ValueError if it is unavailable or its architecture or
    sizes differ."""
    if not config.hub_name:
        raise ValueError(f"{TEXT_FIELD}: this preset's text tower has no pretrained checkpoint (its hub_name is empty)")
    from transformers import AutoModel

    def load(local_files_only: bool) -> PreTrainedModel:
        return AutoModel.from_pretrained(
            config.hub_name, add_pooling_layer=config.pooling == "cls_pooler", local_files_only=local_files_only,
            dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip

    model: PreTrainedModel = load_by_name(config.hub_name, load, field=TEXT_FIELD, what="weights")
    found = model.config
    sizes: list[Any] = [("architecture", found.model_type, config.architecture)]
    sizes += [(ours, getattr(found, theirs, None), getattr(config, ours)) for ours, theirs in _SIZES.items()]
    fixed = {"type_vocab_size": 2 if config.architecture == "bert" else 1, "hidden_act": "gelu"}
    sizes += [(name, getattr(found, name, None), value) for name, value in fixed.items()]
    wrong = [f"{name} {size} (expected {expected})" for name, size, expected in sizes if size != expected]
    if wrong:
        raise ValueError(f"{TEXT_FIELD}: {config.hub_name!r} doesn't match this preset: {', '.join(wrong)}")
    return model
