"""What the model is fed: `Batch`, and the source that has the next one on the device in time.

Synthetic data and shards only differ in where the rows come from; they hand them over as pieces on the host (`Pieces`), and
`BatchSource` puts the pieces together on the device. On CUDA it does so one micro-batch ahead on a stream of its own, so that
the copy runs under the step before it. Making, decoding and tokenising the rows is left to `synthetic` and `shards`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import ShardData, SyntheticData
from clap_ds.model.packed import Packing, pack


@dataclass(slots=True)
class Batch:
    """Audio–caption pairs, all tensors on one device. B pairs, T audio samples, L text tokens (padding included).

    Attributes:
        waveforms: (B, T) float32 in [-1, 1], at the model's sample rate. Pieces may have int16 (`to_int16`), which `join` turns
            into float32 on the device.
        input_ids: (B, L) int64: <s> … </s>, then padding.
        attention_mask: (B, L) int64, 1 at real tokens, 0 at padding.
        num_tokens: real tokens in the batch. Counted from the mask when left out, which waits for the device: give it where
            it's known.
        packed: the captions packed as well (`clap_ds.model.packed`): token ids (tokens,) and where they belong.
    """

    waveforms: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    num_tokens: int = -1
    packed: tuple[Tensor, Packing] | None = None

    def __post_init__(self) -> None:
        assert len(self.waveforms) == len(self.input_ids) == len(self.attention_mask)
        if self.num_tokens < 0:
            self.num_tokens = int(self.attention_mask.sum())

    def __len__(self) -> int:
        return len(self.waveforms)

    @property
    def num_samples(self) -> int:
        """Audio–caption pairs, the "samples" of samples/s."""
        return len(self)

    @property
    def device(self) -> torch.device:
        return self.waveforms.device

    def model_inputs(self) -> tuple[Any, ...]:
        """What the model's forward takes: captions packed where they are, else padded, without a mask where all are full."""
        if self.packed is not None:
            input_ids, packing = self.packed
            return self.waveforms, input_ids, None, packing
        is_full = self.num_tokens == self.input_ids.numel()
        return self.waveforms, self.input_ids, None if is_full else self.attention_mask

    def pack(self) -> None:
        """Pack the captions, which waits for the device where they aren't on the host."""
        if self.packed is None:
            self.packed = _move(pack([(self.input_ids.cpu(), self.attention_mask.cpu())]), self.device)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.waveforms, self.input_ids, self.attention_mask

    def rows(self, start: int, stop: int) -> Batch:
        """Pairs `start` to `stop`, as views. For batches on the host: it counts the tokens anew."""
        return Batch(self.waveforms[start:stop], self.input_ids[start:stop], self.attention_mask[start:stop])

    def pin_memory(self) -> Batch:
        """This batch in page-locked host memory, which the GPU can copy from while the host goes on."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            function(self.waveforms),
            function(self.input_ids),
            function(self.attention_mask),
            num_tokens=self.num_tokens,
            packed=None if self.packed is None else (function(self.packed[0]), self._map_packing(function)),
        )

    def _map_packing(self, function: Callable[[Tensor], Tensor]) -> Packing:
        assert self.packed is not None
        packing = self.packed[1]
        return packing._replace(bounds=function(packing.bounds))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that work on `stream` uses these tensors."""
        packed = () if self.packed is None else (self.packed[0], self.packed[1].bounds)
        for tensor in (*self.tensors(), *packed):
            tensor.record_stream(stream)


def _move(packed: tuple[Tensor, Packing], device: torch.device) -> tuple[Tensor, Packing]:
    ids, packing = packed
    if device.type == "cuda":
        ids, packing = ids.pin_memory(), packing._replace(bounds=packing.bounds.pin_memory())
    bounds = packing.bounds.to(device, non_blocking=True)
    return ids.to(device, non_blocking=True), packing._replace(bounds=bounds)


INT16_SCALE = 32767


def to_int16(waveforms: Tensor) -> Tensor:
    """Waveforms within [-1, 1] rounded to int16, half the bytes to move."""
    return (waveforms * INT16_SCALE).round().to(torch.int16)


def join(pieces: list[Batch], device: torch.device, *, pack_captions: bool = False) -> Batch:
    """One batch on `device` from the rows of `pieces`, without an intermediate copy on the host.

    From pinned memory the copies are asynchronous, on the current stream.

    Args:
        pack_captions: pack them too. A single piece keeps the result, as synthetic batches come again.
    """
    if len(pieces) == 1:
        if pack_captions:
            pieces[0].pack()
        return _as_float(pieces[0].to(device, non_blocking=True))
    num_rows = sum(len(piece) for piece in pieces)
    whole = pieces[0]._map(lambda like: torch.empty(num_rows, *like.shape[1:], dtype=like.dtype, device=device))
    if pack_captions:
        whole.packed = _move(pack([(piece.input_ids, piece.attention_mask) for piece in pieces]), device)
    whole.num_tokens = sum(piece.num_tokens for piece in pieces)
    start = 0
    for piece in pieces:
        for target, source in zip(whole.tensors(), piece.tensors(), strict=True):
            target[start : start + len(piece)].copy_(source, non_blocking=True)
        start += len(piece)
    return _as_float(whole)


def _as_float(batch: Batch) -> Batch:
    # After the copy, for the device converts sooner than the host.
    if batch.waveforms.dtype == torch.int16:
        batch.waveforms = batch.waveforms.float().div_(INT16_SCALE)
    return batch


class Pieces(Protocol):
    """An endless supply of micro-batches, each as pieces: batches whose rows, one after the other, make it up."""

    def __next__(self) -> list[Batch]: ...

    def close(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def statistics(self) -> dict[str, Any]: ...


class _Copy(NamedTuple):
    """A batch on its way to the device, and where its source stood after it."""

    batch: Batch
    done: torch.cuda.Event
    state: dict[str, Any]


class BatchSource(Iterator[Batch]):
    """Endless iterator of batches on the device. Use it as a context manager, or call `close()`.

    Args:
        pieces: where the rows come from.
        device: where the batches are wanted.
        copy_ahead: start copying the next batch, on a stream of its own, whenever one is handed out. CUDA only.
        pack_captions: hand out batches with packed captions.
    """

    def __init__(self, pieces: Pieces, device: torch.device, *, copy_ahead: bool, pack_captions: bool = False) -> None:
        assert device.type == "cuda" or not copy_ahead
        self._pieces = pieces
        self._device = device
        self._pack_captions = pack_captions
        self._copy_stream = torch.cuda.Stream(device) if copy_ahead else None
        self._ahead: _Copy | None = None
        self._state = pieces.state()
        self._closed = False

    def __next__(self) -> Batch:
        """The next batch; work queued on the current stream afterwards sees it complete.

        Raises:
            ValueError: the shards hold nothing that can be used; says how many items were tried and why they failed.
        """
        assert not self._closed, "this BatchSource is closed"
        if self._copy_stream is None:
            batch = join(next(self._pieces), self._device, pack_captions=self._pack_captions)
            self._state = self._pieces.state()
            return batch
        copy = self._ahead or self._start_copy(self._copy_stream)
        compute_stream = torch.cuda.current_stream(self._device)
        compute_stream.wait_event(copy.done)
        copy.batch.record_stream(compute_stream)
        self._state = copy.state
        self._ahead = self._start_copy(self._copy_stream)
        return copy.batch

    def _start_copy(self, stream: torch.cuda.Stream) -> _Copy:
        pieces = next(self._pieces)
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            batch = join(pieces, self._device, pack_captions=self._pack_captions)
            done.record(stream)
        return _Copy(batch, done, self._pieces.state())

    def state(self) -> dict[str, Any]:
        """Where this rank's data stands after the last batch handed out, for `build_batches` to go on from. Fit for JSON."""
        return self._state

    def statistics(self) -> dict[str, Any]:
        """For the run's record: `source`, `num_broken_items`, `broken_items` (the first few: name and reason), …"""
        return self._pieces.statistics()

    def close(self) -> None:
        """Stops worker processes and lets go of the batches. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._ahead = None
            self._pieces.close()

    def __enter__(self) -> BatchSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def build_batches(
    data: SyntheticData | ShardData,
    *,
    model: ClapConfig,
    text_tokens: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    seed: int,
    device: torch.device,
    pack_captions: bool = False,
    state: dict[str, Any] | None = None,
) -> BatchSource:
    """The batches of one rank, as the `clap.data` section describes them, on `device` and without end.

    Args:
        model: gives the sample rate, the samples in a clip and the vocabulary.
        text_tokens: length of every row of `input_ids`.
        micro_batch: rows in a batch.
        pack_captions: hand out batches whose captions are packed as well.
        seed: of the run; ranks draw different data from it, and the same on every run.
        state: of a former source (`BatchSource.state()`) to go on from, this rank's; from another number of ranks, any rank's.
            Exact where ranks, workers, settings and shards are the same, at whatever micro-batch pieces allow; otherwise the
            data goes on in a new order, and rank 0 says why.

    Raises:
        ValueError: settings that can't be met, naming the field: caption lengths that don't fit, missing or empty shards, too
            few shards, a tokenizer that isn't there or doesn't fit the model. Raised on all ranks alike.
    """
    on_cuda = device.type == "cuda"
    if isinstance(data, SyntheticData):
        from clap_ds.data.synthetic import SyntheticPieces

        synthetic = SyntheticPieces(
            data,
            model=model,
            text_tokens=text_tokens,
            micro_batch=micro_batch,
            rank=rank,
            seed=seed,
            device=device,
            state=state,
        )
        copy_ahead = on_cuda and data.placement == "host"
        return BatchSource(synthetic, device, copy_ahead=copy_ahead, pack_captions=pack_captions)
    # Imported here because synthetic runs have no use for audio decoders and tokenizers.
    from clap_ds.data.shards import ShardPieces

    shards = ShardPieces(
        data,
        model=model,
        text_tokens=text_tokens,
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        seed=seed,
        pin=on_cuda,
        state=state,
    )
    return BatchSource(shards, device, copy_ahead=on_cuda, pack_captions=pack_captions)
