"""Features of clips and captions: each rank embeds its share, all ranks get all of them.

The model runs as in use: evaluation mode, no gradients, its own dtype; features are fp32. Micro-batches are always full, the
last filled up with silence or empty captions, so that a compiled model meets one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation.clips import Clip, LoadingError, load_audio
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import tokenize

T = TypeVar("T")


@contextmanager
def evaluating(model: ClapModel) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class Embedder:
    """How features are made and shared.

    Attributes:
        micro_batch: clips or captions per rank and forward pass.
        num_workers: decoding processes per rank.
    """

    ranks: Ranks
    device: torch.device
    micro_batch: int
    num_workers: int

    def clips(self, model: ClapModel, clips: list[Clip], on_batch: Callable[[], None]) -> tuple[Tensor, dict[int, str]]:
        """Features of all clips, (N, D) fp32, and why those that can't be decoded can't, by number; their rows mean nothing. A
        collective.

        Args:
            on_batch: called after each of this rank's micro-batches.

        Raises:
            LoadingError: on all ranks: a decoding process of one is gone.
        """
        audio = model.config.audio
        own = range(self.ranks.rank, len(clips), self.ranks.world_size)
        loaded = load_audio([clips[number] for number in own], audio, num_workers=self.num_workers)
        broken: dict[int, str] = {}
        rows = []
        problem = None
        try:
            for piece in _batched(zip(own, loaded, strict=True), self.micro_batch):
                waveforms = torch.zeros(self.micro_batch, audio.num_samples)
                for row, (number, waveform) in enumerate(piece):
                    if isinstance(waveform, str):
                        broken[number] = waveform
                    else:
                        waveforms[row] = waveform
                rows.append(model.encode_audio(waveforms.to(self.device))[: len(piece)])
                on_batch()
        except LoadingError as error:
            problem = f"rank {self.ranks.rank}: {error}"
        everywhere = self.gather_objects((broken, problem))
        for _, theirs in everywhere:
            if theirs is not None:
                raise LoadingError(theirs)
        features = self._gather(rows, len(clips), model.config.joint_dim)
        return features, {number: reason for each, _ in everywhere for number, reason in each.items()}

    def captions(
        self, model: ClapModel, captions: list[str], tokenizer: PreTrainedTokenizerBase, text_tokens: int
    ) -> Tensor:
        """Features of all captions, (M, D) fp32. A collective."""
        own = captions[self.ranks.rank :: self.ranks.world_size]
        rows = []
        for piece in _batched(own, self.micro_batch):
            filled = piece + [""] * (self.micro_batch - len(piece))
            ids, mask = tokenize(filled, tokenizer, text_tokens)
            rows.append(model.encode_text(ids.to(self.device), mask.to(self.device))[: len(piece)])
        return self._gather(rows, len(captions), model.config.joint_dim)

    def _gather(self, rows: list[Tensor], number: int, dim: int) -> Tensor:
        """(number, dim): all ranks' rows, in the order of the things they took turns with."""
        world_size = self.ranks.world_size
        most = -(-number // world_size)
        own = torch.zeros(most, dim, device=self.device)
        if rows:
            found = torch.cat(rows).float()
            own[: len(found)] = found
        if world_size == 1:
            return own
        everyone = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(everyone, own)
        return torch.stack(everyone, dim=1).flatten(0, 1)[:number]

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, by rank. A collective."""
        if self.ranks.world_size == 1:
            return [value]
        values: list[T] = [value] * self.ranks.world_size
        dist.all_gather_object(values, value)
        return values


def _batched(things: Iterable[T], size: int) -> Iterator[list[T]]:
    batch = []
    for thing in things:
        batch.append(thing)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
