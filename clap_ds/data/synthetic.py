"""Generate random batches of the right shapes, to benchmark without disks and decoders."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from clap_ds.config.model import TextConfig
from clap_ds.config.schema import SyntheticData
from clap_ds.data.batch import Batch, BatchSpec, to_int16
from clap_ds.data.workers import Loader

PIECE_SIZE = 32  # clips that a worker sends together, as shared memory may be small
# RoBERTa's: <s>, <pad>, </s>, <unk>, then words
START_TOKEN_ID = 0
END_TOKEN_ID = 2
FIRST_WORD_ID = 4


class _Clips(Dataset[tuple[Tensor, ...]]):
    """The clips of batches that are repeated endlessly."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = [batch.tensors() for batch in batches]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        number, row = divmod(index, len(self._batches[0][0]))
        return tuple(tensor[row] for tensor in self._batches[number % len(self._batches)])


class SyntheticStream:
    """Generate `num_batches` random batches once and cycle through them. Noise is drawn on the
    device. With workers, those collate each batch again from its clips."""

    def __init__(
        self, data: SyntheticData, spec: BatchSpec, state: dict[str, Any] | None = None
    ) -> None:
        setting = data.caption_lengths
        histogram = (
            setting if isinstance(setting, dict) else {str(setting or spec.context_length): 1.0}
        )
        lengths = torch.tensor(list(map(int, histogram)))
        weights = torch.tensor(list(histogram.values()), dtype=torch.float64)
        on_host = torch.Generator().manual_seed(_mix(spec.seed, spec.rank, 0))
        on_device = torch.Generator(spec.device).manual_seed(_mix(spec.seed, spec.rank, 1))
        self._batches: list[Batch] = []
        for _ in range(data.num_batches):
            drawn = torch.multinomial(
                weights, spec.micro_batch, replacement=True, generator=on_host
            )
            captions = _random_captions(
                lengths[drawn], spec.context_length, spec.model.text, on_host
            )
            noise = torch.empty(spec.micro_batch, *spec.model.audio.clip_shape, device=spec.device)
            noise.uniform_(-1, 1, generator=on_device)
            batch = Batch(
                (noise.half() if spec.model.audio.fusion else to_int16(noise)).cpu(), *captions
            )
            if data.placement == "device":
                batch = batch.to(spec.device)
            elif spec.device.type != "cpu" and not data.num_workers:
                batch = batch.pin_memory()
            self._batches.append(batch)
        self._num_given = (state or {}).get("batches", 0)
        self._starts = range(0, spec.micro_batch, PIECE_SIZE)
        self._loader: Loader[list[Tensor]] | None = None
        if data.num_workers:
            size = spec.micro_batch
            pinned = spec.device.type != "cpu"
            pieces = (
                range(number * size + start, number * size + min(start + PIECE_SIZE, size))
                for number in count(self._num_given)
                for start in self._starts
            )
            self._loader = Loader(
                _Clips(self._batches), num_workers=data.num_workers, section="clap.data", batch_sampler=pieces,
                pin_memory=pinned, multiprocessing_context="fork",
            )  # fmt: skip

    def __next__(self) -> list[Batch]:
        self._num_given += 1
        if self._loader is not None:
            pieces = [next(self._loader) for _ in self._starts]
            return [Batch(audio, ids, mask) for audio, ids, mask in pieces]
        return [self._batches[(self._num_given - 1) % len(self._batches)]]

    def close(self) -> None:
        self._batches.clear()
        if self._loader is not None:
            self._loader.close()

    def state(self) -> dict[str, Any]:
        return {"source": "synthetic", "batches": self._num_given}

    def throughput(self) -> None:
        return None

    def statistics(self) -> dict[str, Any]:
        return {"source": "synthetic", "num_broken_items": 0, "broken_items": []}


def _mix(*parts: int) -> int:  # a 63-bit seed that depends on every part
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _random_captions(
    lengths_B: Tensor, context_length: int, text: TextConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw token ids and attention mask, both (B, context_length) int64, for captions of
    `lengths_B` real tokens."""
    ids = torch.randint(
        FIRST_WORD_ID, text.vocab_size, (len(lengths_B), context_length), generator=generator
    )
    ids[:, 0] = START_TOKEN_ID
    ids[torch.arange(len(ids)), lengths_B - 1] = END_TOKEN_ID
    mask = (torch.arange(context_length) < lengths_B[:, None]).long()
    return ids.masked_fill(mask == 0, text.pad_token_id), mask
