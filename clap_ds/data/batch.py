"""What the model is fed: `Batch`; and what every source of data gives: `Pieces`, rows on the host that `join` puts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from clap_ds.config.model import ClapConfig
from clap_ds.data.loader_throughput import Supply
from clap_ds.model.packed import Packing, pack


@dataclass(slots=True)
class Batch:
    """Audio–caption pairs, all tensors on one device. B pairs, L text tokens (padding included).

    `num_tokens` are the real ones, counted from the mask when left out. `packed` are the captions packed as well
    (`clap_ds.model.packed`): token ids (tokens,) and where they belong.
    """

    audio: (
        Tensor  # what `ClapModel.encode_audio` takes, float32; of pieces also waveforms in int16, features in float16
    )
    input_ids: Tensor  # (B, L) int64: <s> … </s>, then padding
    attention_mask: Tensor  # (B, L) int64, 1 at real tokens, 0 at padding
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
        """Give what the model's forward takes: captions packed where they are, else padded; no mask where all are full."""
        if self.packed is not None:
            input_ids, packing = self.packed
            return self.audio, input_ids, None, packing
        is_full = self.num_tokens == self.input_ids.numel()
        return self.audio, self.input_ids, None if is_full else self.attention_mask

    def pack(self) -> None:
        """Pack the captions, which waits for the device where they aren't on the host."""
        if self.packed is None:
            self.packed = _pack([self], self.device)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.audio, self.input_ids, self.attention_mask

    def rows(self, start: int, stop: int) -> Batch:
        """Pairs `start` to `stop`, as views. For batches on the host: it counts the tokens anew."""
        return Batch(self.audio[start:stop], self.input_ids[start:stop], self.attention_mask[start:stop])

    def pin_memory(self) -> Batch:
        """In page-locked host memory, which the GPU can copy from while the host goes on."""
        return self.map(Tensor.pin_memory)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        packed = self.packed and (function(self.packed[0]), _with_bounds(self.packed[1], function))
        audio, input_ids, mask = map(function, self.tensors())
        return Batch(audio, input_ids, mask, self.num_tokens, packed)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that work on `stream` uses these tensors."""
        for tensor in (*self.tensors(), *((self.packed[0], self.packed[1].bounds) if self.packed else ())):
            tensor.record_stream(stream)


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Which batches a rank wants; see `clap_ds.data.dataloader.build_batches`."""

    model: ClapConfig
    context_length: int
    micro_batch: int
    rank: int
    world_size: int
    seed: int
    device: torch.device


class Pieces(Protocol):
    """An endless supply of micro-batches, each as pieces: batches whose rows, one after the other, make it up.

    `state` is fit for JSON; `statistics` of this rank go into the run's record; `supply` is what workers can give, if known.
    """

    def __next__(self) -> list[Batch]: ...
    def close(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def statistics(self) -> dict[str, Any]: ...
    def supply(self) -> Supply | None: ...


INT16_SCALE = 32768
"""int16 of full scale, as libsndfile has it: 16-bit audio comes through as it was."""


def to_int16(waveforms: Tensor) -> Tensor:
    """Waveforms rounded to int16, half the bytes to move; what is beyond ±1 is clipped."""
    return (waveforms * INT16_SCALE).round_().clamp_(-INT16_SCALE, INT16_SCALE - 1).to(torch.int16)


def join(pieces: Sequence[Batch], device: torch.device, *, pack_captions: bool = False) -> Batch:
    """Put the rows of `pieces` into one batch on `device`, asynchronously from page-locked memory. It shares no audio,
    and a single piece keeps its packed captions, as synthetic batches come again."""
    if len(pieces) == 1:
        if pack_captions:
            pieces[0].pack()
        whole = pieces[0].to(device, non_blocking=True)
    else:
        audio = pieces[0].audio
        rows = torch.empty(sum(map(len, pieces)), *audio.shape[1:], dtype=audio.dtype, device=device)
        for part, piece in zip(rows.split(list(map(len, pieces))), pieces, strict=True):
            part.copy_(piece.audio, non_blocking=True)
        ids = _move(torch.cat([piece.input_ids for piece in pieces]), device)
        mask = _move(torch.cat([piece.attention_mask for piece in pieces]), device)
        packed = _pack(pieces, device) if pack_captions else None
        whole = Batch(rows, ids, mask, sum(piece.num_tokens for piece in pieces), packed)
    if whole.audio.dtype == torch.int16:  # after the copy, for the device converts sooner than the host
        whole.audio = whole.audio / INT16_SCALE
    elif whole.audio.dtype == torch.float16:
        whole.audio = whole.audio.float()
    elif whole.audio is pieces[0].audio and device.type == "cpu":
        whole.audio = whole.audio.clone()
    return whole


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor if device.type == "cpu" else tensor.pin_memory()).to(device, non_blocking=True)


def _pack(pieces: Sequence[Batch], device: torch.device) -> tuple[Tensor, Packing]:
    ids, packing = pack([(piece.input_ids.cpu(), piece.attention_mask.cpu()) for piece in pieces])
    return _move(ids, device), _with_bounds(packing, lambda tensor: _move(tensor, device))


def _with_bounds(packing: Packing, function: Callable[[Tensor], Tensor]) -> Packing:
    return packing._replace(bounds=function(packing.bounds))
