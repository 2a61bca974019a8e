"""A rank's batches on the device in time: on a GPU one is copied ahead, on a stream of its own, under the step before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import ShardData, SyntheticData
from clap_ds.data.batch import Batch, BatchSpec, Pieces, join
from clap_ds.data.loader_throughput import Supply
from clap_ds.data.synthetic import SyntheticPieces

_Ahead = tuple[Batch, Any, dict[str, Any]]  # the event at its copy's end, or None; where its source stood after it


class BatchSource(Iterator[Batch], AbstractContextManager["BatchSource"]):
    """Endless iterator of batches on the device. Use it as a context manager, or call `close()`."""

    def __init__(self, pieces: Pieces, device: torch.device, *, copy_ahead: bool, pack_captions: bool = False) -> None:
        self._pieces = pieces
        self._device = device
        self._pack_captions = pack_captions
        self._copy_stream = torch.cuda.Stream(device) if copy_ahead else None
        self._ahead: _Ahead | None = None
        self._state = pieces.state()

    def __next__(self) -> Batch:
        """Return the next batch; work queued on the current stream afterwards sees it complete."""
        batch, done, self._state = self._ahead or self._take()
        self._ahead = None
        if done:
            compute_stream = torch.cuda.current_stream(self._device)
            compute_stream.wait_event(done)
            batch.record_stream(compute_stream)
            done.synchronize()  # begun a step ago; its source may use the host's memory again
            self._ahead = self._take()
        return batch

    def peek(self) -> Batch:
        self._ahead = self._ahead or self._take()
        batch, done, _ = self._ahead
        if done is not None:
            done.synchronize()
        return batch

    def _take(self) -> _Ahead:
        pieces, stream = next(self._pieces), self._copy_stream
        done = torch.cuda.Event() if stream else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            batch = join(pieces, self._device, pack_captions=self._pack_captions)
            if done:
                done.record(stream)
        return batch, done, self._pieces.state()

    def state(self) -> dict[str, Any]:
        """Tell where this rank's data stands after the last batch handed out, for `build_batches` to resume. Fit for JSON."""
        return self._state

    def statistics(self) -> dict[str, Any]:
        return self._pieces.statistics()

    def supply(self) -> Supply | None:
        return self._pieces.supply()

    def close(self) -> None:
        if self._ahead and self._ahead[1]:
            self._ahead[1].synchronize()
        self._ahead = None
        self._pieces.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def build_batches(
    data: SyntheticData | ShardData,
    *,
    model: ClapConfig,
    context_length: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    seed: int,
    device: torch.device,
    pack_captions: bool = False,
    state: dict[str, Any] | None = None,
    needs_epochs: bool = False,
) -> BatchSource:
    """Open the batches of one rank, as the `clap.data` section describes them, on `device` and without end.

    Args:
        state: of a former source (`BatchSource.state()`) to resume, this rank's; from another number of ranks, any rank's.
            Exact where ranks, workers, settings and shards are the same; else data continues in a new order.
        needs_epochs: local tars without a manifest are counted however large they are.

    Raises:
        ValueError: settings that can't be met, naming the field. On all ranks alike.
    """
    spec = BatchSpec(model, context_length, micro_batch, rank, world_size, seed, device)
    copy_ahead = device.type == "cuda"
    if isinstance(data, SyntheticData):
        pieces: Pieces = SyntheticPieces(data, spec, state)
        copy_ahead = copy_ahead and data.placement == "host"
    else:  # imported here because synthetic runs have no use for audio decoders and tokenizers
        from clap_ds.data.webdataset import ShardPieces

        pieces = ShardPieces(data, spec, state, needs_epochs=needs_epochs)
    return BatchSource(pieces, device, copy_ahead=copy_ahead, pack_captions=pack_captions)
