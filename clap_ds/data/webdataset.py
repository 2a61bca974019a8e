"""Load audio and captions from WebDataset tars in worker processes.

The chain from tars to micro-batches:

1. `plan_reading` finds the tars, and assigns a part of each pass to every worker of this rank.
2. `ShardReader` (`clap_ds.data.shard_reader`) reads one worker's part. It writes audio to a ring
   buffer that it shares with the rank, because 616 ten-second clips take 1.2 GB.
3. `Loader` runs the workers, and receives a chunk of rows from each in turn.
4. `WebDatasetStream` joins chunks to micro-batches, reports skipped items and tracks the state.

The state holds the position of each worker behind its last chunk that is used up.
"""

import hashlib
import json
import math
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import Batch, BatchSpec, LoaderThroughput
from clap_ds.data.clip import SkippedSample
from clap_ds.data.shard_assignment import Source, assign_shards, expand_sources
from clap_ds.data.shard_io import Kind
from clap_ds.data.shard_manifest import FIELD, count_bytes, kind_of, samples_of
from clap_ds.data.shard_reader import START, Chunk, ShardReader, log
from clap_ds.data.staging import StagingFolder
from clap_ds.data.workers import Loader, lock_pages, shared_empty, unlock_pages
from clap_ds.weights.hub import load_tokenizer

# Local tars without a manifest are counted up to this size, which takes a second.
_COUNTED_BYTES = 1e10
# skipped items quoted in errors
_NUM_EXAMPLES = 5
_MAX_CHUNK_ROWS = 32


@dataclass(slots=True)
class ReadingPlan:
    """The tars that a rank's workers read, and what describes their order and contents."""

    kind: Kind
    chunk_rows: int
    # each worker's part of every source
    sources_by_worker: list[list[Source]]
    # everything that determines the order of samples
    order: dict[str, Any]
    # goes into the run's record
    statistics: dict[str, Any]
    staging: StagingFolder | None


def plan_reading(data: ShardData, spec: BatchSpec, *, needs_epochs: bool) -> ReadingPlan:
    """Find the shards, and assign a part of each source to every worker of this rank."""
    sources = expand_sources(data.shards)
    shards = list(chain.from_iterable(source.shards for source in sources))
    kind = kind_of(shards, spec.model, warns=spec.rank == 0)
    samples = samples_of(shards, math.inf if needs_epochs else _COUNTED_BYTES)
    num_samples = sum(samples) if samples else None
    has_epochs = bool(num_samples) and data.has_epochs
    chunk_rows = min(spec.micro_batch, _MAX_CHUNK_ROWS)
    epoch_samples = samples if has_epochs else None
    sources_by_worker = assign_shards(sources, data, spec, epoch_samples, chunk_rows)
    # Names without folders: moved tars are read in the same order.
    contents: Any = []
    for source in sources:
        names = [shard.rpartition("/")[2] for shard in source.shards]
        contents.append([names, source.weight])
    if has_epochs:
        contents = [contents, samples]
    staging = None
    if data.stage_to:
        staging = StagingFolder(data.stage_to)
        _check_room(staging, shards, sources_by_worker, spec.ranks_per_host)
    return ReadingPlan(
        kind,
        chunk_rows,
        sources_by_worker,
        order={
            "ranks": spec.world_size,
            "workers per rank": len(sources_by_worker),
            "rows in a piece": chunk_rows,
            "seed": spec.seed,
            "clap.data.shuffle_buffer": data.shuffle_buffer,
            "clap.data.resampled": data.resampled,
            "shards": hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16],
        },
        statistics={
            "source": "webdataset",
            "kind": kind,
            "num_shards": len(shards),
            "num_samples": num_samples,
            "epoch_samples": num_samples if has_epochs else None,
            "num_workers": data.num_workers,
        },
        staging=staging,
    )


def _check_room(
    staging: StagingFolder,
    shards: list[str],
    sources_by_worker: list[list[Source]],
    ranks_per_host: int,
) -> None:
    """Compare the room for copies of shards with what this host's ranks read."""
    bytes_by_shard = count_bytes(shards)
    shards_of_rank: set[str] = set()
    for sources in sources_by_worker:
        for source in sources:
            shards_of_rank.update(source.shards_read())
    # Ranks read equally much. Neighbors share a shard on the border.
    bytes_of_host = ranks_per_host * sum(bytes_by_shard[shard] for shard in shards_of_rank)
    staging.check_room(min(bytes_of_host, sum(bytes_by_shard.values())))


def resume_state(
    plan: ReadingPlan, spec: BatchSpec, previous: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the state after `previous`, in a new order if it can't be exact.

    `origin` counts all ranks' samples before this order, `samples` this rank's since. `rows_taken`
    counts those of the next worker's current chunk.
    """
    state = {
        "source": "webdataset",
        "order": plan.order,
        "origin": 0,
        "samples": 0,
        "positions": [START] * len(plan.sources_by_worker),
        "next_worker": 0,
        "rows_taken": 0,
    }
    if previous is None:
        return state
    previous_order = previous.get("order", {})
    differences = [
        f"{name} (then {previous_order.get(name)}, now {value})"
        for name, value in plan.order.items()
        if previous_order.get(name) != value
    ]
    if not differences:
        return state | previous
    previous_ranks = previous_order.get("ranks", spec.world_size)
    origin = previous.get("origin", 0) + previous.get("samples", 0) * previous_ranks
    state["origin"] = origin
    if spec.rank == 0:
        log(
            f"resuming after {origin:,} samples in a new order, because these changed: "
            f"{', '.join(differences)}"
        )
    return state


def _num_chunks(plan: ReadingPlan, micro_batch: int, num_workers: int) -> tuple[int, int]:
    """Return how many chunks each worker makes ahead, and how many its ring buffer holds."""
    num_readers = len(plan.sources_by_worker)
    # A micro-batch may begin and end within a chunk.
    chunks_in_use = math.ceil((micro_batch - 1) / plan.chunk_rows) + 1
    slots_in_use = math.ceil(chunks_in_use / num_readers)
    if num_workers == 0:
        return 0, slots_in_use
    # Two micro-batches wait ahead of the one in use, and each worker fills another chunk.
    chunks_ahead = max(2, math.ceil(2 * micro_batch / (plan.chunk_rows * num_readers)))
    return chunks_ahead, chunks_ahead + slots_in_use


def _allocate_ring_buffers(
    plan: ReadingPlan, data: ShardData, spec: BatchSpec, num_slots: int
) -> Tensor:
    """Return shared memory for audio, (workers, slots, rows of a chunk, *row shape)."""
    audio = spec.model.audio
    row_shape = audio.clip_shape
    dtype: torch.dtype = getattr(torch, data.audio_dtype)
    if plan.kind == "mel":
        row_shape = audio.feature_shape
        dtype = torch.float16
    elif audio.fusion and data.audio_dtype == "int16":
        # Fusion's rows are features, in 16 bits, too.
        dtype = torch.float16
    shape = (len(plan.sources_by_worker), num_slots, plan.chunk_rows, *row_shape)
    return shared_empty(shape, dtype)


class _Readers(IterableDataset[Chunk]):
    """The readers of all workers, of which each worker process runs its own."""

    def __init__(self, readers: list[ShardReader]) -> None:
        self._readers = readers

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        return self._readers[worker.id if worker else 0].chunks()


class WebDatasetStream:
    """Endless micro-batches of one rank. Arguments and errors: see
    `clap_ds.data.dataloader.build_batches`."""

    def __init__(
        self,
        data: ShardData,
        spec: BatchSpec,
        state: dict[str, Any] | None = None,
        *,
        needs_epochs: bool = False,
    ) -> None:
        self._num_workers = data.num_workers
        self._micro_batch = spec.micro_batch
        plan = plan_reading(data, spec, needs_epochs=needs_epochs)
        self._kind = plan.kind
        self._statistics = plan.statistics
        self._state = resume_state(plan, spec, state)
        chunks_ahead, num_slots = _num_chunks(plan, spec.micro_batch, data.num_workers)
        self._ring_buffers = _allocate_ring_buffers(plan, data, spec, num_slots)
        self._chunks = self._start_workers(plan, data, spec, chunks_ahead)
        # the chunk in use, and its rows
        self._current: tuple[Chunk, Batch] | None = None
        # by name
        self._skipped: dict[str, SkippedSample] = {}
        # for the workers' throughput
        self._timed_rows = 0
        self._timed_s = 0.0
        if spec.device.type == "cuda":
            self._lock_ring_buffers()

    def _start_workers(
        self, plan: ReadingPlan, data: ShardData, spec: BatchSpec, chunks_ahead: int
    ) -> Loader[Chunk]:
        text = spec.model.text
        tokenizer = load_tokenizer(
            data.tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id
        )
        # Draws differ between orders, ranks and workers.
        seed = f"seed {spec.seed}, after {self._state['origin']}, rank {spec.rank}"
        readers = []
        for worker, sources in enumerate(plan.sources_by_worker):
            reader = ShardReader(
                worker,
                sources,
                data,
                spec,
                tokenizer,
                self._ring_buffers[worker],
                seed=f"{seed}, worker {worker}",
                start=self._state["positions"][worker],
                staging=plan.staging,
            )
            readers.append(reader)
        # The loader polls workers in turn, so the next one comes first.
        next_worker = self._state["next_worker"]
        dataset = _Readers(readers[next_worker:] + readers[:next_worker])
        options: dict[str, Any] = {}
        if data.num_workers:
            options = {"prefetch_factor": chunks_ahead, "multiprocessing_context": "fork"}
        return Loader(
            dataset, num_workers=data.num_workers, section="clap.data", batch_size=None, **options
        )

    def _lock_ring_buffers(self) -> None:
        """Page-lock the audio's memory, for copies to the GPU that don't block the host."""
        if lock_pages(self._ring_buffers):
            # Not in `close`, which also runs after errors: CUDA could wait for unfinished work of
            # other ranks.
            weakref.finalize(self, unlock_pages, self._ring_buffers).atexit = False
        else:
            log(
                "clap.data: CUDA can't lock the memory of the workers' audio; copies to "
                "the GPU block the host"
            )

    def __next__(self) -> list[Batch]:
        """Return rows that are valid until the next call."""
        pieces = []
        num_missing = self._micro_batch
        while num_missing:
            if self._current is None:
                self._current = self._receive()
            chunk, batch = self._current
            start = self._state["rows_taken"]
            piece = batch.rows(start, min(start + num_missing, len(batch)))
            pieces.append(piece)
            num_missing -= len(piece)
            self._state["rows_taken"] += len(piece)
            if self._state["rows_taken"] == len(batch):
                self._finish_chunk(chunk)
        self._state["samples"] += self._micro_batch
        return pieces

    def _finish_chunk(self, chunk: Chunk) -> None:
        # A new list, because states that were returned before hold the old one.
        positions = [*self._state["positions"]]
        positions[chunk.worker] = chunk.position
        self._state["positions"] = positions
        self._state["next_worker"] = (chunk.worker + 1) % len(positions)
        self._state["rows_taken"] = 0
        self._current = None

    def _receive(self) -> tuple[Chunk, Batch]:
        """Receive the next worker's chunk, and report the items that it skipped."""
        chunk = next(self._chunks)
        for item in chunk.skipped:
            # Several workers may report the same one.
            if item.name not in self._skipped:
                log(f"skipped {item}")
                self._skipped[item.name] = item
        if chunk.failure:
            self.close()
            examples = "; ".join(map(str, islice(self._skipped.values(), _NUM_EXAMPLES)))
            cause = "they contain no items"
            if examples:
                cause = f"{len(self._skipped)} broken, the first: {examples}"
            raise ValueError(f"{FIELD}: {chunk.failure}; {cause}")
        batch = chunk.batch(self._ring_buffers)
        if chunk.made_in_s:
            self._timed_rows += len(batch)
            self._timed_s += chunk.made_in_s
        return chunk, batch

    def throughput(self) -> LoaderThroughput | None:
        if not self._timed_s:
            return None
        rate = max(self._num_workers, 1) * self._timed_rows / self._timed_s
        return LoaderThroughput(rate, self._num_workers, self._kind)

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def statistics(self) -> dict[str, Any]:
        """Return statistics that count skipped items and damaged tars once each; unknown numbers of
        samples are None."""
        skipped = [asdict(item) for item in self._skipped.values()]
        return {**self._statistics, "num_broken_items": len(skipped), "broken_items": skipped}

    def close(self) -> None:
        self._chunks.close()
