"""Load audio and captions from WebDataset tars in worker processes.

The chain from tars to micro-batches:

1. `find_shards` finds the tars, and `ShardSet.assign` gives every worker of this rank its part of
   each pass.
2. `ShardReader` (`clap_ds.data.shard_reader`) reads one worker's part. It writes audio to a ring
   buffer that it shares with the rank, because 616 ten-second clips take 1.2 GB.
3. `Loader` runs the workers, and receives a chunk of rows from each in turn.
4. `WebDatasetStream` joins chunks to micro-batches, reports skipped items and tracks the state.

The state holds the position of each worker behind its last chunk that is used up, from which the
same ranks and workers continue exactly. It also holds which samples of the epoch have been drawn
(`clap_ds.data.epoch_progress`), so that any other number of ranks and workers reads the rest.
"""

import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clap_ds.config.schema import ShardData
from clap_ds.data.batch import Batch, BatchSpec, LoaderThroughput
from clap_ds.data.clip import SkippedSample
from clap_ds.data.epoch_progress import (
    DrawnSamples,
    decode_unfinished,
    encode_unfinished,
    find_unfinished,
)
from clap_ds.data.shard_assignment import (
    ReaderLayout,
    Source,
    UnfinishedPass,
    assign_shards,
    assign_shares,
    expand_sources,
)
from clap_ds.data.shard_io import Kind
from clap_ds.data.shard_manifest import FIELD, count_bytes, kind_of, samples_of
from clap_ds.data.shard_reader import START, Chunk, Position, ShardReader, log
from clap_ds.data.staging import StagingFolder
from clap_ds.data.workers import Loader, lock_pages, shared_empty, unlock_pages
from clap_ds.weights.hub import load_tokenizer

# Local tars without a manifest are counted up to this size, which takes a second.
_COUNTED_BYTES = 1e10
# skipped items quoted in errors
_NUM_EXAMPLES = 5
_MAX_CHUNK_ROWS = 32


@dataclass(slots=True)
class ShardSet:
    """The tars of a run's sources, and what describes their order and contents."""

    sources: list[Source]
    kind: Kind
    # per source, each tar's samples; None: unknown, or drawn with replacement
    samples: list[list[int]] | None
    layout: ReaderLayout
    # everything that determines the order of samples
    order: dict[str, Any]
    # goes into the run's record
    statistics: dict[str, Any]

    def assign(
        self, data: ShardData, spec: BatchSpec, unfinished: list[list[UnfinishedPass]]
    ) -> list[list[Source]]:
        """Return each worker's part of every source."""
        if self.samples is None:
            return assign_shards(self.sources, data, spec)
        return assign_shares(self.sources, self.samples, self.layout, spec.rank, unfinished)


def find_shards(data: ShardData, spec: BatchSpec, *, needs_epochs: bool) -> ShardSet:
    """Find the shards, count their samples and describe their order."""
    sources = expand_sources(data.shards)
    shards = list(chain.from_iterable(source.shards for source in sources))
    kind = kind_of(shards, spec.model, warns=spec.rank == 0)
    counts = samples_of(shards, math.inf if needs_epochs else _COUNTED_BYTES)
    num_samples = sum(counts) if counts else None
    samples = None
    if counts and not data.resampled:
        remaining_counts = iter(counts)
        samples = [list(islice(remaining_counts, len(source.shards))) for source in sources]
        if not all(map(sum, samples)):
            # A source without samples has no passes.
            samples = None
    chunk_rows = min(spec.micro_batch, _MAX_CHUNK_ROWS)
    layout = ReaderLayout(
        spec.world_size,
        max(data.num_workers, 1),
        chunk_rows,
        spec.seed,
        shuffles_tars=data.shuffle_buffer > 0,
    )
    # Names without folders: moved tars are read in the same order.
    contents: Any = []
    for source in sources:
        names = [shard.rpartition("/")[2] for shard in source.shards]
        contents.append([names, source.weight])
    if samples:
        contents = [contents, counts]
    return ShardSet(
        sources,
        kind,
        samples,
        layout,
        order={
            "ranks": layout.world_size,
            "workers per rank": layout.num_workers,
            "rows in a piece": layout.chunk_rows,
            "seed": layout.seed,
            "clap.data.shuffle_buffer": data.shuffle_buffer,
            "clap.data.resampled": data.resampled,
            "shards": hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16],
        },
        statistics={
            "source": "webdataset",
            "kind": kind,
            "num_shards": len(shards),
            "num_samples": num_samples,
            "epoch_samples": num_samples if samples and data.has_epochs else None,
            "num_workers": data.num_workers,
        },
    )


def set_up_staging(
    data: ShardData,
    spec: BatchSpec,
    sources: list[Source],
    sources_by_worker: list[list[Source]],
) -> StagingFolder | None:
    """Return the folder of `clap.data.stage_to`, if it has room for what this host reads."""
    if not data.stage_to:
        return None
    staging = StagingFolder(data.stage_to)
    shards = list(chain.from_iterable(source.shards for source in sources))
    _check_room(staging, shards, sources_by_worker, spec.ranks_per_host)
    return staging


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


@dataclass(slots=True)
class ReadingState:
    """Where a rank's reading stands.

    Attributes:
        origin: all ranks' samples before this order.
        samples: this rank's samples since.
        positions: of each worker, behind its last chunk that is used up.
        rows_taken: rows of the next worker's current chunk that are used.
        drawn: what the workers have drawn of their shares; None if it isn't known.
        unfinished: per source, the passes that this order completes.
    """

    order: dict[str, Any]
    positions: list[Position]
    unfinished: list[list[UnfinishedPass]]
    drawn: DrawnSamples | None
    origin: int = 0
    samples: int = 0
    next_worker: int = 0
    rows_taken: int = 0

    def copy(self) -> Self:
        drawn = self.drawn.copy() if self.drawn else None
        return replace(self, positions=[*self.positions], drawn=drawn)

    def to_json(self, samples: list[list[int]] | None, *, is_first_rank: bool) -> dict[str, Any]:
        content = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        content["source"] = "webdataset"
        if samples and self.drawn:
            content["drawn"] = self.drawn.to_json()
            # equal on all ranks
            if is_first_rank and any(self.unfinished):
                content["unfinished"] = encode_unfinished(self.unfinished, samples)
        return content


_PLAIN_FIELDS = ("order", "origin", "samples", "positions", "next_worker", "rows_taken")


def resume_state(
    shards: ShardSet, spec: BatchSpec, previous_by_rank: Sequence[dict[str, Any]]
) -> ReadingState:
    """Return the state after a checkpoint's, which is exact in the same order. In another one,
    the ranks read what is left of unfinished passes first, if it is known."""
    num_workers = shards.layout.num_workers
    num_sources = len(shards.sources)
    state = ReadingState(
        shards.order,
        [START] * num_workers,
        [[] for _ in range(num_sources)],
        DrawnSamples.none_yet(num_workers, num_sources) if shards.samples else None,
    )
    if not previous_by_rank:
        return state
    first = previous_by_rank[0]
    previous_order = first.get("order", {})
    differences = [
        f"{name} (then {previous_order.get(name)}, now {value})"
        for name, value in shards.order.items()
        if previous_order.get(name) != value
    ]
    is_same_data = previous_order.get("shards") == shards.order["shards"]
    unfinished = state.unfinished
    if shards.samples and is_same_data and "unfinished" in first:
        unfinished = decode_unfinished(first["unfinished"], shards.samples)
    if not differences:
        previous = previous_by_rank[spec.rank]
        drawn = None
        if shards.samples and "drawn" in previous:
            drawn = DrawnSamples.from_json(previous["drawn"])
        fields = {name: previous[name] for name in _PLAIN_FIELDS}
        return ReadingState(**fields, unfinished=unfinished, drawn=drawn)
    num_read = first.get("samples", 0) * len(previous_by_rank)
    state.origin = first.get("origin", 0) + num_read
    next_samples = "with a new epoch in a new order"
    is_known = all("drawn" in previous for previous in previous_by_rank)
    if shards.samples and is_same_data and is_known:
        state.unfinished = _find_left(shards, previous_by_rank, unfinished, num_read)
        num_left = sum(num for passes in state.unfinished for _, num in passes)
        # Between two epochs, nothing is left.
        if num_left:
            next_samples = f"with the {num_left:,} samples that the unfinished epoch has left"
    if spec.rank == 0:
        log(
            f"resuming after {state.origin:,} samples {next_samples}, because these changed: "
            f"{', '.join(differences)}"
        )
    return state


def _find_left(
    shards: ShardSet,
    previous_by_rank: Sequence[dict[str, Any]],
    unfinished: list[list[UnfinishedPass]],
    num_read: int,
) -> list[list[UnfinishedPass]]:
    """Return per source what a checkpoint's readers, which had their own `unfinished` passes, left
    of theirs."""
    assert shards.samples is not None
    order = previous_by_rank[0]["order"]
    layout = ReaderLayout(
        order["ranks"],
        order["workers per rank"],
        order["rows in a piece"],
        order["seed"],
        shuffles_tars=order["clap.data.shuffle_buffer"] > 0,
    )
    drawn_by_rank = [DrawnSamples.from_json(state["drawn"]) for state in previous_by_rank]
    is_mixed = len(shards.sources) > 1
    left = []
    for number, samples in enumerate(shards.samples):
        progress = [share for drawn in drawn_by_rank for share in drawn.of_source(number)]
        partition = layout.divide(samples, unfinished[number], is_mixed=is_mixed)
        tar_order = layout.tar_order(len(samples))
        left.append(find_unfinished(partition, progress, tar_order, num_read))
    return left


def _num_chunks(layout: ReaderLayout, micro_batch: int, num_workers: int) -> tuple[int, int]:
    """Return how many chunks each worker makes ahead, and how many its ring buffer holds."""
    num_readers = layout.num_workers
    # A micro-batch may begin and end within a chunk.
    chunks_in_use = math.ceil((micro_batch - 1) / layout.chunk_rows) + 1
    slots_in_use = math.ceil(chunks_in_use / num_readers)
    if num_workers == 0:
        return 0, slots_in_use
    # Two micro-batches wait ahead of the one in use, and each worker fills another chunk.
    chunks_ahead = max(2, math.ceil(2 * micro_batch / (layout.chunk_rows * num_readers)))
    return chunks_ahead, chunks_ahead + slots_in_use


def _allocate_ring_buffers(
    shards: ShardSet, data: ShardData, spec: BatchSpec, num_slots: int
) -> Tensor:
    """Return shared memory for audio, (workers, slots, rows of a chunk, *row shape)."""
    audio = spec.model.audio
    row_shape = audio.clip_shape
    dtype: torch.dtype = getattr(torch, data.audio_dtype)
    if shards.kind == "mel":
        row_shape = audio.feature_shape
        dtype = torch.float16
    elif audio.fusion and data.audio_dtype == "int16":
        # Fusion's rows are features, in 16 bits, too.
        dtype = torch.float16
    layout = shards.layout
    shape = (layout.num_workers, num_slots, layout.chunk_rows, *row_shape)
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
        states: Sequence[dict[str, Any]] = (),
        *,
        needs_epochs: bool = False,
    ) -> None:
        self._num_workers = data.num_workers
        self._micro_batch = spec.micro_batch
        shards = find_shards(data, spec, needs_epochs=needs_epochs)
        self._kind = shards.kind
        self._samples = shards.samples
        self._statistics = shards.statistics
        self._is_first_rank = spec.rank == 0
        self._state = resume_state(shards, spec, states)
        chunks_ahead, num_slots = _num_chunks(shards.layout, spec.micro_batch, data.num_workers)
        self._ring_buffers = _allocate_ring_buffers(shards, data, spec, num_slots)
        self._chunks = self._start_workers(shards, data, spec, chunks_ahead)
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
        self, shards: ShardSet, data: ShardData, spec: BatchSpec, chunks_ahead: int
    ) -> Loader[Chunk]:
        sources_by_worker = shards.assign(data, spec, self._state.unfinished)
        staging = set_up_staging(data, spec, shards.sources, sources_by_worker)
        text = spec.model.text
        tokenizer = load_tokenizer(
            data.tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id
        )
        # Draws differ between orders, ranks and workers.
        seed = f"seed {spec.seed}, after {self._state.origin}, rank {spec.rank}"
        readers = []
        for worker, sources in enumerate(sources_by_worker):
            reader = ShardReader(
                worker,
                sources,
                data,
                spec,
                tokenizer,
                self._ring_buffers[worker],
                seed=f"{seed}, worker {worker}",
                start=self._state.positions[worker],
                staging=staging,
            )
            readers.append(reader)
        # The loader polls workers in turn, so the next one comes first.
        next_worker = self._state.next_worker
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
            start = self._state.rows_taken
            piece = batch.rows(start, min(start + num_missing, len(batch)))
            pieces.append(piece)
            num_missing -= len(piece)
            self._take_rows(chunk, len(piece))
        self._state.samples += self._micro_batch
        return pieces

    def _take_rows(self, chunk: Chunk, num_rows: int) -> None:
        """Advance the state by some rows of the current chunk."""
        state = self._state
        stop = state.rows_taken + num_rows
        if state.drawn:
            draws = [draw for draw in chunk.draws if state.rows_taken <= draw.row < stop]
            state.drawn.add(chunk.worker, draws)
        state.rows_taken = stop
        if stop == self._ring_buffers.shape[2]:
            state.positions[chunk.worker] = chunk.position
            state.next_worker = (chunk.worker + 1) % len(state.positions)
            state.rows_taken = 0
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

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return partial(self._state.copy().to_json, self._samples, is_first_rank=self._is_first_rank)

    def statistics(self) -> dict[str, Any]:
        """Return statistics that count skipped items and damaged tars once each; unknown numbers of
        samples are None."""
        skipped = [asdict(item) for item in self._skipped.values()]
        return {**self._statistics, "num_broken_items": len(skipped), "broken_items": skipped}

    def close(self) -> None:
        self._chunks.close()
