"""Move a rank's batches to its device. On a GPU, the next batch is copied during the current step
on its own stream, after the step before, whose batch's memory it may take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from clap_ds.config.schema import ShardData, SyntheticData
from clap_ds.data.batch import Batch, BatchSpec, MicroBatchStream, describe, join
from clap_ds.data.synthetic import SyntheticStream
from clap_ds.distributed.collectives import gather, rank
from clap_ds.run_records.cpu_binding import CORES
from clap_ds.run_records.run_dir import RunDirectory

_Ahead = tuple[
    Batch, Any, dict[str, Any]
]  # the copy's end event or None; the source's state after the batch


class BatchSource(Iterator[Batch], AbstractContextManager["BatchSource"]):
    """Iterate endlessly over batches on the device. Use as a context manager, or call `close()`."""

    def __init__(
        self,
        pieces: MicroBatchStream,
        device: torch.device,
        *,
        copy_ahead: bool,
        pack_captions: bool = False,
    ) -> None:
        self._pieces = pieces
        self._device = device
        self._pack_captions = pack_captions
        self._copy_stream = torch.cuda.Stream(device) if copy_ahead else None
        self._ahead: _Ahead | None = None
        self._state = pieces.state()
        self._is_reported = False

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
        pieces = next(self._pieces)
        stream = self._copy_stream
        done = torch.cuda.Event() if stream else None
        if stream:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream) if stream else nullcontext():
            batch = join(pieces, self._device, pack_captions=self._pack_captions)
            if done:
                done.record(stream)
        return batch, done, self._pieces.state()

    def state(self) -> dict[str, Any]:
        """Return this rank's JSON-serializable state after the last returned batch, for
        `build_batches` to resume."""
        return self._state

    def statistics(self) -> dict[str, Any]:
        return self._pieces.statistics()

    def report_throughput(self, rates: Iterable[float], ranks_per_host: int) -> None:
        """Print once, on rank 0, whether workers keep up with the fastest of several steps, given
          their `rates` in clips/s
        without waiting for data."""
        rates = [*rates]
        found = self._pieces.throughput()
        if not self._is_reported and rank() == 0 and found is not None and len(rates) > 1:
            print(
                describe(found, max(rates), ranks_per_host=ranks_per_host, cores=len(CORES)),
                flush=True,
            )
            self._is_reported = True

    def record_statistics(self, record: RunDirectory) -> None:
        """Record statistics, and the samples that any rank couldn't use. A collective."""
        found = gather(self.statistics())
        broken = {
            each["name"]: each for of_rank in found for each in of_rank.get("broken_items", ())
        }
        if rank() == 0:
            counted = {"num_broken_items": len(broken), "broken_items": [*broken.values()][:5]}
            record.update_summary(data=found[0] | counted)

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
    pack_captions: bool = False,
    state: dict[str, Any] | None = None,
    needs_epochs: bool = False,
    **spec: Any,
) -> BatchSource:
    """Build one rank's endless batches on a device from the `clap.data` section.

    Args:
        state: `BatchSource.state()` of this rank to resume, or of any rank if the number of ranks
          changed. Exact if ranks,
            workers, settings and shards are unchanged; else data continues in a new order.
        needs_epochs: count local tars without a manifest regardless of their size.
        spec: fields of `BatchSpec`.

    Raises:
        ValueError: invalid settings, with the field's name, on all ranks.
    """
    of_rank = BatchSpec(**spec)
    pieces: MicroBatchStream
    if isinstance(data, SyntheticData):
        pieces = SyntheticStream(data, of_rank, state)
    else:
        from clap_ds.data.webdataset import WebDatasetStream  # needs audio decoders and tokenizers

        pieces = WebDatasetStream(data, of_rank, state, needs_epochs=needs_epochs)
    copy_ahead = of_rank.device.type == "cuda" and getattr(data, "placement", "host") == "host"
    return BatchSource(pieces, of_rank.device, copy_ahead=copy_ahead, pack_captions=pack_captions)
