"""Evaluate a model with mteb, such as on its audio benchmark MAEB:
`mteb.evaluate(MtebEncoder("CHECKPOINT"), tasks)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, as_tensor
from torch.utils.data import DataLoader

from clap_ds.inference.model import Array, load


class MtebEncoder:
    """Embed mteb's audio and texts: its `EncoderProtocol`. `options` are those of
    `clap_ds.load`."""

    def __init__(self, model_name: str, revision: str | None = None, **options: Any) -> None:
        self.clap = load(model_name, **options)

    @property
    def mteb_model_meta(self) -> Any:
        """Return an `mteb.ModelMeta`. Its revision is that of the weights, under which mteb stores
        results."""
        from mteb.models import ModelMeta

        told = {"name": f"clap-ds/{Path(self.clap.source).name}", "revision": self.clap.fingerprint}
        return ModelMeta.create_empty(
            {**told, "modalities": ["audio", "text"], "embed_dim": self.clap.dim}
        )

    def encode(self, inputs: DataLoader[Any], *, batch_size: int = 32, **told: Any) -> Array:
        """Embed rows with `audio`, `text` or both, whose embeddings are added: (n, dim) float32."""
        inputs.collate_fn = list
        found = [np.empty((0, self.clap.dim), np.float32)]
        for rows in inputs:
            embeds: Any = {"audio": self.clap.embed_audio, "text": self.clap.embed_text}
            named = {name: [row[name] for row in rows] for name in embeds if name in rows[0]}
            found.append(
                sum(embeds[name](each, batch_size=batch_size) for name, each in named.items())
            )
        return np.concatenate(found)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Compute all cosines: (n, m)."""
        return _normalized(embeddings1) @ _normalized(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Compute the cosines of pairs: (n,)."""
        return (_normalized(embeddings1) * _normalized(embeddings2)).sum(-1)


def _normalized(embeddings: Any) -> Tensor:
    return F.normalize(as_tensor(embeddings).float(), dim=-1)
