"""Load `transformers` models from a folder, the local Hub cache or the Hub, in this order.

`transformers` itself contacts the Hub first and hangs if a firewall drops packets. Here the Hub
comes last, and only if it answers within a time limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub import constants, get_session

from clap_ds.config.clap_json import TEXT
from clap_ds.config.errors import first_line
from clap_ds.config.model import TextConfig
from clap_ds.config.model_names import preset_names
from clap_ds.config.open_clip import PREFIX
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio if installed)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
