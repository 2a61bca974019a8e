"""Evaluate a model with mteb, such as on its audio benchmark MAEB.

mteb.evaluate(MtebEncoder("CHECKPOINT"), tasks)
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, as_tensor
from torch.utils.data import DataLoader

from clap_ds.inference.model import Array, load


class MtebEncoder:
    """An encoder of audio and texts for mteb: its `EncoderProtocol`.

    `options` are those of `clap_ds.load`.
    """

    def __init__(self, model_name: str, revision: str | None = None, **options: Any) -> None:
        self.clap = load(model_name, **options)

    @property
    def mteb_model_meta(self) -> Any:
        """Return an `mteb.ModelMeta`. mteb stores results under its revision: that of the
        weights."""
        from mteb.models import ModelMeta  # an optional package

        fields = {
            "name": f"clap-ds/{Path(self.clap.source).name}",
            "revision": self.clap.fingerprint,
            "modalities": ["audio", "text"],
            "embed_dim": self.clap.dim,
        }
        return ModelMeta.create_empty(fields)

    def encode(self, inputs: DataLoader[Any], *, batch_size: int = 32, **_: Any) -> Array:
        """Embed rows with `audio`, `text` or both: (n, dim) float32.

        The embeddings of both are added. Arguments that describe mteb's task have no effect.
        """
        # Lists of rows: sounds differ in length, so they can't be stacked.
        inputs.collate_fn = list
        batches = [np.empty((0, self.clap.dim), np.float32)]
        for rows in inputs:
            vectors = np.zeros((len(rows), self.clap.dim), np.float32)
            if "audio" in rows[0]:
                sounds = [row["audio"] for row in rows]
                vectors += self.clap.embed_audio(sounds, batch_size=batch_size)
            if "text" in rows[0]:
                texts = [row["text"] for row in rows]
                vectors += self.clap.embed_text(texts, batch_size=batch_size)
            batches.append(vectors)
        return np.concatenate(batches)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Compute all cosines: (n, m)."""
        return _normalize(embeddings1) @ _normalize(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Compute the cosines of pairs: (n,)."""
        return (_normalize(embeddings1) * _normalize(embeddings2)).sum(-1)


def _normalize(embeddings: Any) -> Tensor:
    return F.normalize(as_tensor(embeddings).float(), dim=-1)
