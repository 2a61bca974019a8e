"""Move a rank's batches to its device. On a GPU, the next batch is copied during the current step
on its own stream, after the step before, whose batch's memory it may take."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from clap_ds.config.schema import ShardData, SyntheticData
from clap_ds.data.batch import Batch, BatchSpec, MicroBatchStream, describe, join
from clap_ds.data.synthetic import SyntheticStream
from clap_ds.distributed.collectives import gather, rank
from clap_ds.run_records.cpu_binding import CORES
from clap_ds.run_records.run_dir import RunDirectory


class _Prefetched(NamedTuple):
    batch: Batch
    # the end of its copy on the GPU, or None
    copied: torch.cuda.Event | None
    # makes the stream's state after the batch
    snapshot: Callable[[], dict[str, Any]]


class BatchSource(Iterator[Batch], AbstractContextManager["BatchSource"]):
    """Endless batches on the device. Use as a context manager, or call `close()`."""

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
        self._prefetched: _Prefetched | None = None
        self._snapshot = pieces.snapshot()
        self._is_reported = False

    def __next__(self) -> Batch:
        """Return the next batch, ready for work queued on the current stream."""
        batch, copied, self._snapshot = self._prefetched or self._prefetch()
        self._prefetched = None
        if copied:
            torch.cuda.current_stream(self._device).wait_event(copied)
            # Started a step ago. After it, the pieces may reuse their host memory.
            copied.synchronize()
            self._prefetched = self._prefetch()
        return batch

    def peek(self) -> Batch:
        """Return the batch that `next` will return."""
        self._prefetched = self._prefetched or self._prefetch()
        if self._prefetched.copied:
            self._prefetched.copied.synchronize()
        return self._prefetched.batch

    def _prefetch(self) -> _Prefetched:
        pieces = next(self._pieces)
        stream = self._copy_stream
        if stream is None:
            batch = join(pieces, self._device, pack_captions=self._pack_captions)
            return _Prefetched(batch, None, self._pieces.snapshot())
        # The batch may take memory that queued work still reads.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(stream):
            batch = join(pieces, self._device, pack_captions=self._pack_captions)
            copied.record(stream)
        return _Prefetched(batch, copied, self._pieces.snapshot())

    def state(self) -> dict[str, Any]:
        """Return this rank's JSON-serializable state after the last returned batch. From those of
        all ranks, `build_batches` resumes."""
        return self._snapshot()

    def statistics(self) -> dict[str, Any]:
        return self._pieces.statistics()

    def report_throughput(self, rates: Iterable[float], ranks_per_host: int) -> None:
        """Print once, on rank 0, whether workers keep up with the fastest of several steps, given
        their `rates` in clips/s without waiting for data."""
        if self._is_reported or rank() != 0:
            return
        rates = [*rates]
        throughput = self._pieces.throughput()
        # The fastest of several steps, because the first ones are slower.
        if throughput and len(rates) > 1:
            cores = len(CORES)
            report = describe(throughput, max(rates), ranks_per_host=ranks_per_host, cores=cores)
            print(report, flush=True)
            self._is_reported = True

    def record_statistics(self, record: RunDirectory) -> None:
        """Record statistics, and the samples that any rank couldn't use. A collective."""
        statistics_by_rank = gather(self.statistics())
        if rank() != 0:
            return
        # Ranks share the tars at the border of their parts, so they may report the same item.
        skipped = {}
        for statistics in statistics_by_rank:
            for item in statistics.get("broken_items", ()):
                skipped[item["name"]] = item
        counts = {"num_broken_items": len(skipped), "broken_items": [*skipped.values()][:5]}
        record.update_summary(data=statistics_by_rank[0] | counts)

    def close(self) -> None:
        # A copy may still read the memory that the pieces release.
        if self._prefetched and self._prefetched.copied:
            self._prefetched.copied.synchronize()
        self._prefetched = None
        self._pieces.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def build_batches(
    data: SyntheticData | ShardData,
    *,
    pack_captions: bool = False,
    states: Sequence[dict[str, Any]] = (),
    needs_epochs: bool = False,
    **spec: Any,
) -> BatchSource:
    """Build one rank's endless batches on a device from the `clap.data` section.

    Args:
        states: `BatchSource.state()` of all ranks to resume, by rank. The order of samples is
            continued if ranks, workers, settings and shards are unchanged. If only the shards are,
            what is left of the epoch comes in another order; else a new epoch begins.
        needs_epochs: count local tars without a manifest regardless of their size.
        spec: fields of `BatchSpec`.

    Raises:
        ValueError: invalid settings, with the field's name, on all ranks.
    """
    batch_spec = BatchSpec(**spec)
    device = batch_spec.device
    pieces: MicroBatchStream
    if isinstance(data, SyntheticData):
        pieces = SyntheticStream(data, batch_spec, states)
    else:
        # needs audio decoders and tokenizers
        from clap_ds.data.webdataset import WebDatasetStream

        pieces = WebDatasetStream(data, batch_spec, states, needs_epochs=needs_epochs)
    is_on_host = getattr(data, "placement", "host") == "host"
    copy_ahead = device.type == "cuda" and is_on_host
    return BatchSource(pieces, device, copy_ahead=copy_ahead, pack_captions=pack_captions)
