"""Generate random batches of the right shapes, to benchmark without disks and decoders."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

# Clips that a worker sends together are few, as shared memory may be small.
PIECE_SIZE = 32
# RoBERTa's: <s>, <pad>, </s>, <unk>, then words
START_TOKEN_ID = 0
END_TOKEN_ID = 2
FIRST_WORD_ID = 4


class _Clips(Dataset[tuple[Tensor, ...]]):
    """The clips of batches that are repeated endlessly."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        number, row = divmod(index, len(self._batches[0]))
        # Indices continue endlessly, so that a resumed run goes on with the next batch.
        batch = self._batches[number % len(self._batches)]
        return tuple(tensor[row] for tensor in batch.tensors())


class SyntheticStream:
    """`num_batches` random batches that are generated once and repeated. With workers, those
    collate each batch again from its clips."""

    def __init__(
        self, data: SyntheticData, spec: BatchSpec, states: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._batches = _random_batches(data, spec)
        # Ranks draw equally many batches.
        self._num_batches = states[0].get("batches", 0) if states else 0
        self._starts = range(0, spec.micro_batch, PIECE_SIZE)
        self._loader: Loader[list[Tensor]] | None = None
        if data.num_workers:
            # Forked, so that workers share the batches' memory.
            self._loader = Loader(
                _Clips(self._batches),
                num_workers=data.num_workers,
                section="clap.data",
                batch_sampler=self._indices_of_pieces(spec.micro_batch),
                pin_memory=spec.device.type != "cpu",
                multiprocessing_context="fork",
            )

    def _indices_of_pieces(self, micro_batch: int) -> Iterator[range]:
        for number in count(self._num_batches):
            for start in self._starts:
                stop = min(start + PIECE_SIZE, micro_batch)
                yield range(number * micro_batch + start, number * micro_batch + stop)

    def __next__(self) -> list[Batch]:
        number = self._num_batches
        self._num_batches += 1
        if self._loader is None:
            return [self._batches[number % len(self._batches)]]
        pieces = [next(self._loader) for _ in self._starts]
        return [Batch(audio, ids, mask) for audio, ids, mask in pieces]

    def close(self) -> None:
        self._batches.clear()
        if self._loader is not None:
            self._loader.close()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return partial(dict, source="synthetic", batches=self._num_batches)

    def throughput(self) -> None:
        return None

    def statistics(self) -> dict[str, Any]:
        return {"source": "synthetic", "num_broken_items": 0, "broken_items": []}


def _random_batches(data: SyntheticData, spec: BatchSpec) -> list[Batch]:
    """Generate batches that depend on the seed and rank. Noise is drawn on the device."""
    # A single length is a histogram of one bin.
    lengths = data.caption_lengths or spec.context_length
    weights = lengths if isinstance(lengths, dict) else {str(lengths): 1.0}
    length_of = torch.tensor([int(length) for length in weights])
    probabilities = torch.tensor([*weights.values()], dtype=torch.float64)
    # Captions are equal on all devices, noise isn't.
    host_rng = torch.Generator().manual_seed(_mix(spec.seed, spec.rank, 0))
    device_rng = torch.Generator(spec.device).manual_seed(_mix(spec.seed, spec.rank, 1))
    audio = spec.model.audio
    batches = []
    for _ in range(data.num_batches):
        drawn = torch.multinomial(
            probabilities, spec.micro_batch, replacement=True, generator=host_rng
        )
        ids, mask = _random_captions(
            length_of[drawn], spec.context_length, spec.model.text, host_rng
        )
        noise = torch.empty(spec.micro_batch, *audio.clip_shape, device=spec.device)
        noise.uniform_(-1, 1, generator=device_rng)
        # Features of fusion have float16, as from shards.
        batch = Batch((noise.half() if audio.fusion else to_int16(noise)).cpu(), ids, mask)
        if data.placement == "device":
            batch = batch.to(spec.device)
        elif spec.device.type != "cpu" and not data.num_workers:
            batch = batch.pin_memory()
        batches.append(batch)
    return batches


def _mix(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _random_captions(
    lengths_B: Tensor, context_length: int, text: TextConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw token ids and attention mask, both (B, context_length) int64, for captions of
    `lengths_B` real tokens."""
    ids = torch.randint(
        FIRST_WORD_ID, text.vocab_size, (len(lengths_B), context_length), generator=generator
    )
    # <s> w w w </s> <pad> <pad>
    ids[:, 0] = START_TOKEN_ID
    ids[torch.arange(len(ids)), lengths_B - 1] = END_TOKEN_ID
    mask = (torch.arange(context_length) < lengths_B[:, None]).long()
    return ids.masked_fill(mask == 0, text.pad_token_id), mask
