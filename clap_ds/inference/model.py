"""A trained CLAP in use: sounds and texts to embeddings, and labels for sounds, by the code that evaluation embeds with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clap_ds.config.errors import did_you_mean
from clap_ds.config.model import load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.config.sections import ZeroShotSettings
from clap_ds.data.captions import in_words
from clap_ds.evaluation.clips import Clip
from clap_ds.evaluation.embedding import audio_batches, class_captions, class_features, embed_text
from clap_ds.inference.windows import Sound, Source, Which, name_of, read_windows
from clap_ds.model.tokenizer import PreTrainedTokenizerBase, load_tokenizer
from clap_ds.ranks.accelerator import choose_accelerator, set_up_cuda
from clap_ds.weights.formats import Checkpoint
from clap_ds.weights.load import load_weights

TEMPLATES: tuple[str, ...] = tuple(ZeroShotSettings.model_fields["templates"].default)
DTYPES = ("float32", "bfloat16", "float16")
BATCH_SIZE = 32

Array = NDArray[np.float32]
Audio = str | Path | Clip | NDArray[Any]


@dataclass(frozen=True, slots=True)
class Row:
    """The embedding of a window of a source, or of all of it.

    Attributes:
        source: its path, `tar: key` of a clip in a shard.
        start_s, end_s: of the window; of a row for a whole file, 0 and its length.
        vector: (dim,) float32 of length 1; None where the file, or the rest of it, can't be used.
        error: why.
    """

    source: str
    start_s: float
    end_s: float
    vector: Array | None
    error: str = ""


class Clap:
    """A model that `clap_ds.load` gives.

    >>> import clap_ds
    >>> clap = clap_ds.load("my_run-checkpoints", best=True)
    >>> clap.embed_audio(["dog.wav", "rain.flac"]).shape
    (2, 32)
    >>> clap.embed_text("a dog barks").shape
    (1, 32)
    >>> for probability in clap.classify("dog.wav", ["dog", "rain"]).round(6).sum(axis=1).tolist():
    ...     print(probability)
    1.0
    >>> for row in clap.iter_windows(["storm.wav"], overlap=0.5):
    ...     print(f"{row.source} {row.start_s:.1f}–{row.end_s:.1f} s: {row.error or row.vector.shape}")
    storm.wav 0.0–1.0 s: (32,)
    storm.wav 0.5–1.5 s: (32,)
    storm.wav 0.8–1.8 s: (32,)

    The same input gives the same bits on one machine, whatever is embedded beside it, as batches are filled up to `batch_size`.
    So does evaluation in float32, by micro-batches of that size. Another `batch_size` may round otherwise (seen: 1.3e-7), as
    matrix products of other shapes add in other orders. What is given alone, not in a list, goes in a batch that isn't filled
    up, which takes less time, and is rounded as such.

    Attributes:
        model: in evaluation mode.
        config: its sizes.
        source: where it was loaded from.
        fingerprint: of its weights, hex: equal for models whose embeddings can be compared, in whatever format they lie.
        sample_rate: that sounds are resampled to, Hz.
        clip_s: length of its window, s.
        dim: of its embeddings.
        text_tokens: longest caption; longer ones are cut.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, tokenizer: str | None = None
    ) -> None:
        self.config, self.source, self.fingerprint = checkpoint.config, checkpoint.path, checkpoint.fingerprint
        self.model = checkpoint.build_for(device, dtype)
        self.text_tokens = checkpoint.text_tokens or self.config.text.usual_tokens
        audio = self.config.audio
        self.sample_rate, self.clip_s, self.dim = (
            audio.sample_rate,
            audio.num_samples / audio.sample_rate,
            self.config.joint_dim,
        )
        self._tokenizer_name = tokenizer or checkpoint.tokenizer_name

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of its captions, found when it is first needed; a ValueError where there is none."""
        if self._tokenizer_name is None:
            raise ValueError("tokenizer: missing: the one that the model's captions are for")
        return load_tokenizer(self._tokenizer_name, vocab_size=self.config.text.vocab_size, field="tokenizer")

    def embed_audio(
        self,
        audio: Audio | Sequence[Audio],
        sample_rate: int | None = None,
        *,
        windows: Which = "mean",
        overlap: float = 0.0,
        batch_size: int = BATCH_SIZE,
        num_workers: int = 0,
    ) -> Array:
        """Embeddings of sounds of any length, (n, dim) float32, rows of length 1.

        Args:
            audio: paths of audio files, clips of shards, or arrays (num_samples,) or (channels, num_samples), floating of full
                scale ±1 or int16; a list of them, or a single one (n = 1). Channels are averaged, other rates resampled;
                what is shorter than the model's window is repeated.
            sample_rate: of the arrays, Hz; files say their own.
            windows: of what is longer than a window the normalised mean of its windows' embeddings ("mean"), or the embedding
                of its middle ("middle"), as evaluation takes it.
            overlap: share of a window that the next one starts before its end, 0 to below 1.
            batch_size: windows at a time.
            num_workers: processes that decode files while the model computes; 0: none.

        Raises:
            ValueError: of the first item that can't be used, naming it: a file that is missing, none that libsndfile reads,
                damaged or silent throughout, an array of another shape or dtype or without a sample rate, NaN.
        """
        if windows == "each":
            raise ValueError("windows: expected 'mean' or 'middle', a row for each sound; iter_windows gives 'each'")
        sources, is_alone = _sources(audio, sample_rate)
        vectors = [np.empty((0, self.dim), np.float32)]
        for row in self._rows(sources, windows, overlap, batch_size, num_workers, fill=not is_alone):
            if row.vector is None:
                raise ValueError(f"{row.source}: {row.error}")
            vectors.append(row.vector[None])
        return np.concatenate(vectors)

    def iter_windows(
        self,
        sources: Iterable[Source],
        *,
        windows: Which = "each",
        overlap: float = 0.0,
        batch_size: int = BATCH_SIZE,
        num_workers: int = 0,
    ) -> Iterator[Row]:
        """Rows of files of any length, in the order of the sources, of which only a batch of windows is in memory.

        Args:
            sources: paths of audio files, or clips of shards.
            windows: a row for every window ("each"), one every (1 - overlap) · `clip_s` and one that ends with the file; or a
                row for each file, as `embed_audio` has them.
            overlap, batch_size, num_workers: as of `embed_audio`.

        A file that can't be used is a row without a vector that says why; of "each" it comes after the windows up to there.

        Raises:
            ValueError: an option that can't be; a decoding process was killed.
        """
        return self._rows(sources, windows, overlap, batch_size, num_workers)

    def _rows(
        self,
        sources: Iterable[Source],
        windows: Which,
        overlap: float,
        batch_size: int,
        num_workers: int,
        fill: bool = True,
    ) -> Iterator[Row]:
        _check_options(windows, overlap, batch_size, num_workers)
        sources = list(sources)
        found = self._embedded(sources, windows, overlap, batch_size, num_workers, fill)
        return _in_rows(map(name_of, sources), found, windows)

    def _embedded(
        self, sources: list[Source], which: Which, overlap: float, batch_size: int, num_workers: int, fill: bool
    ) -> Iterator[_Embedded]:
        """What `read_windows` gives, with vectors for waveforms."""
        reading: dict[str, Any] = {"which": which, "overlap": overlap, "num_workers": num_workers, "ahead": batch_size}
        waiting: deque[_Embedded] = deque()

        def waveforms() -> Iterator[torch.Tensor]:
            for piece in read_windows(sources, self.config.audio, **reading):
                waiting.append(_Embedded(piece.start_s, piece.end_s, piece.error, piece.waveform is None))
                if piece.waveform is not None:
                    yield piece.waveform

        for features in audio_batches(self.model, waveforms(), batch_size, fill=fill):
            for vector in features.cpu().numpy():
                while waiting[0].is_end:
                    yield waiting.popleft()
                waiting[0].vector = vector
                yield waiting.popleft()
        yield from waiting

    def embed_text(self, texts: str | Sequence[str], *, batch_size: int = BATCH_SIZE) -> Array:
        """Embeddings of texts, (n, dim) float32, rows of length 1; of a single text n = 1. Texts are cut after `text_tokens`.

        Raises:
            ValueError: a text that is blank or no text; the tokenizer can't be had.
        """
        return self._embed_text(
            [texts] if isinstance(texts, str) else list(texts), batch_size, not isinstance(texts, str)
        )

    def _embed_text(self, texts: list[str], batch_size: int, fill: bool) -> Array:
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"texts[{number}]: expected a text, found {text!r}")
        _check_options("mean", 0.0, batch_size, 0)
        rows = embed_text(self.model, texts, self.tokenizer, self.text_tokens, batch_size, fill=fill)
        return rows.cpu().numpy()

    def class_embeddings(self, labels: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Array:
        """What zero-shot evaluation compares sounds with, (len(labels), dim) float32, rows of length 1: the normalised mean of
        the embeddings of each label in every template, {} in its place, with spaces for underscores (`dog_bark`).

        Raises:
            ValueError: no labels, one twice or blank, a template without {}; the tokenizer can't be had.
        """
        labels = [labels] if isinstance(labels, str) else list(labels)
        if not labels or not all(isinstance(label, str) and label.strip() for label in labels):
            raise ValueError(f"labels: expected one text or more, found {labels!r}")
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"labels: {twice[0]!r} stands there twice")
        templates = [templates] if isinstance(templates, str) else list(templates)
        if not templates or (wrong := [text for text in templates if "{}" not in text]):
            raise ValueError(
                f"templates: expected texts with {{}} in the label's place, found {(templates and wrong[0])!r}"
            )
        captions = class_captions({label: [in_words(label)] for label in labels}, templates)
        text = self._embed_text(list(chain(*captions)), BATCH_SIZE, fill=True)
        return class_features(captions, torch.from_numpy(text)).numpy()

    def classify(
        self,
        audio: Audio | Sequence[Audio],
        labels: Sequence[str],
        templates: Sequence[str] = TEMPLATES,
        sample_rate: int | None = None,
        **options: Any,
    ) -> Array:
        """Probabilities of the labels for each sound, (n, len(labels)) float32: the softmax of the model's logit scale times
        the cosines with `class_embeddings`. `options` and errors are those of `embed_audio` and `class_embeddings`; a
        ValueError for fewer than two labels, too."""
        classes = self.class_embeddings(labels, templates)
        if len(classes) < 2:
            raise ValueError(f"labels: expected at least 2 to tell apart, found {labels!r}")
        return self.probabilities(self.embed_audio(audio, sample_rate, **options), classes)

    def probabilities(self, audio: Array, classes: Array) -> Array:
        """(n, K) float32: `classify`, of embeddings of sounds (n, dim) and of classes (K, dim)."""
        scale = self.model.logit_scale.detach().double().exp().cpu()
        cosines = torch.from_numpy(audio).double() @ torch.from_numpy(classes).double().T
        return (scale * cosines).softmax(dim=1).float().numpy()


@dataclass(slots=True)
class _Embedded:
    start_s: float
    end_s: float
    error: str
    is_end: bool
    vector: Array | None = None


def _in_rows(names: Iterable[str], found: Iterator[_Embedded], windows: Which) -> Iterator[Row]:
    """What each source's windows and its end become."""
    for name in names:
        total, number, failed = np.zeros(1), 0, ""
        for each in found:
            if each.vector is not None and not np.isfinite(each.vector).all():
                each.error, each.vector = "its embedding is NaN or infinite", None
            failed = failed or each.error
            if each.vector is not None:
                total, number = total + each.vector, number + 1
            if windows == "each" and (each.error or each.vector is not None):
                yield Row(name, each.start_s, each.end_s, each.vector, each.error)
            if each.is_end:
                break
        if windows != "each":
            length = 1.0 if number == 1 else np.linalg.norm(total) or 1.0
            yield Row(name, 0.0, each.end_s, None if failed else (total / length).astype(np.float32), failed)


def _sources(audio: Any, sample_rate: int | None) -> tuple[list[Source], bool]:
    """What `embed_audio` was given, and whether that was a single thing."""
    is_alone = isinstance(audio, Source) or hasattr(audio, "__array__")
    named = {"audio": audio} if is_alone else {f"audio[{number}]": each for number, each in enumerate(audio)}
    paths = [each if isinstance(each, Source) else _sound(name, each, sample_rate) for name, each in named.items()]
    return paths, is_alone


def _sound(name: str, samples: Any, sample_rate: int | None) -> Sound:
    array = np.asarray(samples)
    if array.dtype.kind != "f" and array.dtype != np.int16:
        raise ValueError(f"{name}: expected a path, or samples in floating point or int16, found {array.dtype}")
    rows = array.reshape(1, -1) if array.ndim == 1 else array
    if rows.ndim != 2 or not 0 < len(rows) < max(2, rows.shape[1]):
        raise ValueError(f"{name}: expected (num_samples,) or (channels, num_samples), found {array.shape}")
    if not isinstance(sample_rate, int | np.integer) or sample_rate <= 0:
        raise ValueError(f"sample_rate: expected that of the array {name} in Hz, a whole number, found {sample_rate!r}")
    return Sound(name, rows if array.dtype == np.int16 else rows.astype(np.float32, copy=False), int(sample_rate))


def _check_options(windows: str, overlap: float, batch_size: int, num_workers: int) -> None:
    if windows not in ("each", "mean", "middle"):
        raise ValueError(f"windows: expected each, mean or middle, found {windows!r}")
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap: expected a share from 0 to below 1, found {overlap!r}")
    for name, number, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if not isinstance(number, int) or number < least:
            raise ValueError(f"{name}: expected a whole number from {least}, found {number!r}")


def load(
    source: str | Path,
    *,
    best: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    tokenizer: str | None = None,
    preset: str | None = None,
) -> Clap:
    """A trained model to embed and classify with.

    Args:
        source: one of this project's checkpoints, or the folder they lie in; a folder that `transformers.ClapModel` loads, or
            the id of one on the hub (its cache on this host comes first); a LAION-CLAP .pt file.
        best: of a folder of checkpoints the best by its run's `best_by` instead of the newest.
        device: default: a GPU where there is one, else the CPU.
        dtype: float32, bfloat16 or float16, which the model computes in; embeddings are float32.
        tokenizer: hub name or folder; default: the checkpoint's.
        preset: the model's sizes, for a .pt file that doesn't tell them.

    Raises:
        ValueError: nothing there, none of these, damaged, not finite, an option that can't be.
        UserError: a GPU is there that torch can't use.
    """
    if (name := str(dtype).removeprefix("torch.")) not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join(DTYPES)}, found {dtype!r}")
    try:
        expected = None if preset is None else load_preset(preset)
    except KeyError:
        raise ValueError(f"preset: there is no {preset!r}{did_you_mean(str(preset), preset_names())}") from None
    try:
        where = torch.device(device or choose_accelerator())
    except RuntimeError as error:
        raise ValueError(f"device: {str(error).splitlines()[0]}") from None
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: {str(device)!r}, and torch finds no GPU here")
        set_up_cuda()
    clap = Clap(load_weights(source, expected, best=best), where, getattr(torch, name), tokenizer)
    if tokenizer is not None:
        clap.tokenizer  # noqa: B018  (a wrong name shows at once)
    return clap
