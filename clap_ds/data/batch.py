"""Define `Batch`, the model's input, and `MicroBatchStream`, the protocol of data sources whose
pieces `join` assembles to batches on the device. `describe` compares a source's throughput with the
step's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from clap_ds.config.model import CONTEXT_LENGTH, INT16_SCALE, ClapConfig
from clap_ds.data.shard_io import Kind
from clap_ds.model.packed import Packing, pack


@dataclass(slots=True)
class Batch:
    """B audio–caption pairs of L text tokens (including padding), all on one device.

    `num_tokens` excludes padding; it is counted from the mask by default. `packed` optionally holds
    the captions as token ids (tokens,) and their `Packing` (`clap_ds.model.packed`).
    """

    # input of `ClapModel.encode_audio`: int16 or float32; in pieces also float16 features
    audio: Tensor
    # (B, L) int64: <s> … </s>, then padding
    input_ids: Tensor
    # (B, L) int64, 1 at real tokens, 0 at padding
    attention_mask: Tensor
    num_tokens: int = -1
    packed: tuple[Tensor, Packing] | None = None

    def __post_init__(self) -> None:
        assert len(self.audio) == len(self.input_ids) == len(self.attention_mask)
        if self.num_tokens < 0:
            self.num_tokens = int(self.attention_mask.sum())

    def __len__(self) -> int:
        return len(self.audio)

    @property
    def device(self) -> torch.device:
        return self.audio.device

    def model_inputs(self) -> tuple[Any, ...]:
        """Return the arguments of the model's forward: packed captions if any, else padded ones; no
        mask without padding."""
        if self.packed is not None:
            input_ids, packing = self.packed
            return self.audio, input_ids, None, packing
        is_full = self.num_tokens == self.input_ids.numel()
        return self.audio, self.input_ids, None if is_full else self.attention_mask

    def pack(self) -> None:
        """Pack the captions. Synchronizes if they are on a GPU."""
        if self.packed is None:
            self.packed = _pack([self], self.device)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.audio, self.input_ids, self.attention_mask

    def rows(self, start: int, stop: int) -> Batch:
        """Return views of pairs `start` to `stop`. For host batches only, because it recounts the
        tokens."""
        audio, input_ids, mask = (tensor[start:stop] for tensor in self.tensors())
        return Batch(audio, input_ids, mask)

    def pin_memory(self) -> Batch:
        """Copy to page-locked host memory for asynchronous copies to the GPU."""
        return self.map(Tensor.pin_memory)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        packed = None
        if self.packed:
            input_ids, packing = self.packed
            packed = function(input_ids), packing._replace(cu_seqlens=function(packing.cu_seqlens))
        audio, input_ids, mask = map(function, self.tensors())
        return Batch(audio, input_ids, mask, self.num_tokens, packed)


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The shape and origin of a rank's batches; see `clap_ds.data.dataloader.build_batches`."""

    model: ClapConfig
    context_length: int = CONTEXT_LENGTH
    micro_batch: int = 1
    rank: int = 0
    world_size: int = 1
    ranks_per_host: int = 1
    seed: int = 0
    # A device is immutable.
    device: torch.device = torch.device("cpu")  # noqa: RUF009


class MicroBatchStream(Protocol):
    """Endless micro-batches, each a list of `Batch` pieces to be concatenated.

    `snapshot` returns a function that makes the JSON-serializable state after the last micro-batch,
    because most states are never saved. `statistics` go into the run's record. `throughput` is the
    workers' throughput, if known.
    """

    def __next__(self) -> list[Batch]: ...
    def close(self) -> None: ...
    def snapshot(self) -> Callable[[], dict[str, Any]]: ...
    def statistics(self) -> dict[str, Any]: ...
    def throughput(self) -> LoaderThroughput | None: ...


def to_int16(waveforms: Tensor) -> Tensor:
    """Round waveforms to int16, clipping at ±1."""
    return (waveforms * INT16_SCALE).round_().clamp_(-INT16_SCALE, INT16_SCALE - 1).to(torch.int16)


def join(pieces: Sequence[Batch], device: torch.device, *, pack_captions: bool = False) -> Batch:
    """Concatenate `pieces` into one batch on `device` without sharing audio, asynchronously from
    page-locked memory. A single piece caches its packed captions, because synthetic batches
    repeat."""
    if len(pieces) == 1:
        (piece,) = pieces
        if pack_captions:
            piece.pack()
        batch = piece.to(device, non_blocking=True)
    else:
        parts = [piece.audio for piece in pieces]
        num_rows = [len(part) for part in parts]
        audio = parts[0].new_empty(sum(num_rows), *parts[0].shape[1:], device=device)
        # Part by part, because the host may hold only one copy.
        for target, part in zip(audio.split(num_rows), parts, strict=True):
            target.copy_(part, non_blocking=True)
        ids = _move(torch.cat([piece.input_ids for piece in pieces]), device)
        mask = _move(torch.cat([piece.attention_mask for piece in pieces]), device)
        packed = _pack(pieces, device) if pack_captions else None
        batch = Batch(audio, ids, mask, sum(piece.num_tokens for piece in pieces), packed)
    if batch.audio.dtype == torch.float16:
        # after the copy, because the device converts faster
        batch.audio = batch.audio.float()
    elif device.type == "cpu" and len(pieces) == 1:
        # Workers reuse the piece's memory.
        batch.audio = batch.audio.clone()
    return batch


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _pack(pieces: Sequence[Batch], device: torch.device) -> tuple[Tensor, Packing]:
    ids, packing = pack([(piece.input_ids.cpu(), piece.attention_mask.cpu()) for piece in pieces])
    return _move(ids, device), packing._replace(cu_seqlens=_move(packing.cu_seqlens, device))


class LoaderThroughput(NamedTuple):
    """The total throughput of a rank's workers."""

    samples_per_s: float
    # 0: loading in the training process
    num_workers: int
    kind: Kind


# The loader should be faster than the step by this factor, so that uneven clips don't make it wait.
MARGIN = 1.25


def describe(
    throughput: LoaderThroughput, needed: float, *, ranks_per_host: int, cores: int
) -> str:
    """Report whether the loader sustains the `needed` clips per second of a rank's step, and what
    to do if not."""
    rate = throughput.samples_per_s
    num_workers = throughput.num_workers
    if num_workers == 0:
        return (
            "clap.data.num_workers: 0: loading in the training process makes each step "
            f"{needed / rate:.0%} longer"
        )
    report = (
        f"clap.data: {num_workers} worker(s) can load {rate:,.0f} clips/s,"
        f" their rank's step needs {needed:,.0f}"
    )
    advised_workers = math.ceil(MARGIN * needed * num_workers / rate)
    if advised_workers <= num_workers:
        return f"{report}: enough"
    problem = "the step will wait" if needed > rate else f"margin below {MARGIN - 1:.0%}"
    report += f": {problem}. Set clap.data.num_workers to {advised_workers}"
    # Each rank has a process of its own, too.
    if (advised_workers + 1) * ranks_per_host > cores:
        report += f", which is more than this host's {cores} cores for {ranks_per_host} rank(s)"
    if throughput.kind == "encoded":
        report += "; prepared shards need fewer (clap-ds shards prepare)"
    return report
