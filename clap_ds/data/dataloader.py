"""Move a rank's batches to its device. On a GPU, the next batch is copied during the current step on its own stream, after
the step before, whose batch's memory it may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import ShardData, SyntheticData
from clap_ds.data.batch import Batch, BatchSpec, MicroBatchStream, join
from clap_ds.data.loader_throughput import LoaderThroughput
from clap_ds.data.synthetic import SyntheticStream

_Ahead = tuple[Batch, Any, dict[str, Any]]  # the copy's end event or None; the source's state after the batch


class BatchSource(Iterator[Batch], AbstractContextManager["BatchSource"]):
    """Iterate endlessly over batches on the device. Use as a context manager, or call `close()`."""

    def __init__(
        self, pieces: MicroBatchStream, device: torch.device, *, copy_ahead: bool, pack_captions: bool = False
    ) -> None:
        self._pieces = pieces
        self._device = device
        self._pack_captions = pack_captions
        self._copy_stream = torch.cuda.Stream(device) if copy_ahead else None
        self._ahead: _Ahead | None = None
        self._state = pieces.state()

    def __next__(self) -> Batch:
        """Return the next batch, ready for work queued on the current stream."""
        batch, done, self._state = self._ahead or self._take()
        self._ahead = None
        if done:
            torch.cuda.current_stream(self._device).wait_event(done)
            done.synchronize()  # started a step ago; then the source may reuse its host memory
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
        if stream:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream) if stream else nullcontext():
            batch = join(pieces, self._device, pack_captions=self._pack_captions)
            if done:
                done.record(stream)
        return batch, done, self._pieces.state()

    def state(self) -> dict[str, Any]:
        """Return this rank's JSON-serializable state after the last returned batch, for `build_batches` to resume."""
        return self._state

    def statistics(self) -> dict[str, Any]:
        return self._pieces.statistics()

    def throughput(self) -> LoaderThroughput | None:
        return self._pieces.throughput()

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
    """Build one rank's endless batches on `device` from the `clap.data` section.

    Args:
        state: `BatchSource.state()` of this rank to resume, or of any rank if the number of ranks changed. Exact if ranks,
            workers, settings and shards are unchanged; else data continues in a new order.
        needs_epochs: count local tars without a manifest regardless of their size.

    Raises:
        ValueError: invalid settings, with the field's name, on all ranks.
    """
    spec = BatchSpec(model, context_length, micro_batch, rank, world_size, seed, device)
    copy_ahead = device.type == "cuda"
    if isinstance(data, SyntheticData):
        pieces: MicroBatchStream = SyntheticStream(data, spec, state)
        copy_ahead = copy_ahead and data.placement == "host"
    else:  # imported here because synthetic runs don't need audio decoders and tokenizers
        from clap_ds.data.webdataset import WebDatasetStream

        pieces = WebDatasetStream(data, spec, state, needs_epochs=needs_epochs)
    return BatchSource(pieces, device, copy_ahead=copy_ahead, pack_captions=pack_captions)
