"""Use a trained CLAP: embed audio and text and classify audio, with evaluation's code."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.model import load_preset
from clap_ds.config.schema import ZeroShotSettings
from clap_ds.data.build_shards.caption_lists import in_words
from clap_ds.distributed.accelerator import choose_accelerator
from clap_ds.distributed.device import set_up_cuda
from clap_ds.evaluation.clips import Clip
from clap_ds.evaluation.embedding import (
    audio_batches,
    class_captions,
    class_features,
    embed_text,
    load_model_tokenizer,
)
from clap_ds.inference.audio_windows import (
    AudioInput,
    EmbeddingRow,
    Pooling,
    Source,
    Window,
    read_windows,
)
from clap_ds.weights.formats import Checkpoint
from clap_ds.weights.hub import PreTrainedTokenizerBase

TEMPLATES: Sequence[str] = ZeroShotSettings.model_fields["templates"].default
# Of an array whose orientation the caller states.
MAX_CHANNELS = 8

Array = NDArray[np.float32]
Audio = str | Path | Clip | bytes | IO[bytes] | NDArray[Any] | Mapping[str, Any]


class Clap:
    """A model from `clap_ds.load` that embeds and classifies.

    >>> import clap_ds
    >>> clap = clap_ds.load("my_run-1a2b3c4d-checkpoints", best=True)
    >>> clap.embed_audio(["dog.wav", "rain.flac"]).shape, clap.embed_text("a dog barks").shape
    ((2, 32), (1, 32))
    >>> clap.classify("dog.wav", ["dog", "rain"]).sum(axis=1).round(6).tolist()
    [1.0]

    Batches are padded to `batch_size`: an input's result is bitwise independent of the others, and
    equals evaluation's in float32. A single input that isn't in a list isn't padded, and may be
    rounded differently.

    Windows last `clip_s` (s) at `sample_rate` (Hz). Embeddings have `dim` elements, and are
    comparable if `fingerprint` is equal. Texts are truncated to `context_length`.
    """

    def __init__(
        self, weights: Checkpoint, device: torch.device, dtype: torch.dtype, tokenizer: str | None
    ) -> None:
        self.config = weights.config
        self.source = weights.path
        self.fingerprint = weights.fingerprint
        self.sample_rate = self.config.audio.sample_rate
        self.dim = self.config.joint_dim
        self.clip_s = self.config.audio.num_samples / self.sample_rate
        self.context_length = weights.longest_caption
        self.model = weights.build_for(device, dtype)
        if tokenizer is not None:
            weights = replace(weights, tokenizer=tokenizer, trusts_tokenizer=True)
        # The tensors are the model's by now.
        self._weights = replace(weights, state={})

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_model_tokenizer(self._weights.tokenizer_name, self.config.text, "tokenizer")

    def embed_audio(
        self,
        audio: Audio | Sequence[Audio],
        sample_rate: float | None = None,
        *,
        channels_first: bool | None = None,
        pooling: Pooling = "mean",
        **options: Any,
    ) -> Array:
        """Embed sounds of any length: (n, dim) float32, rows of length 1.

        Args:
            audio: a list of sounds, an array (n, channels, num_samples), or a single sound (n = 1).
                A sound is a path, a clip of a shard, an encoded file (bytes or a binary file), an
                array, or, as in `datasets`, a decoder or a dict of `array` and `sampling_rate`.
                Arrays are (num_samples,) or (channels, num_samples) with one or two channels,
                floating point in ±1 or int16. A batch of mono clips is a list: `list(array)`.
            sample_rate: of arrays, in Hz.
            channels_first: True for arrays (channels, num_samples) of up to 8 channels, False for
                (num_samples, channels).
            pooling: of longer sounds: "mean" of all windows' embeddings, normalized, or the
                "center" window, as in evaluation (with feature fusion the whole sound).
            options: `overlap`, `batch_size` and `num_workers` of `iter_windows`.

        Raises:
            ValueError: for the first unusable sound.
        """
        sounds: Any = audio
        is_single = _is_single_sound(sounds)
        if is_single:
            sources = [_as_source("audio", sounds, sample_rate, channels_first)]
        else:
            sources = [
                _as_source(f"audio[{number}]", sound, sample_rate, channels_first)
                for number, sound in enumerate(sounds)
            ]
        vectors = [np.empty((0, self.dim), np.float32)]
        for row in self.iter_windows(sources, pooling=pooling, _fill=not is_single, **options):
            if row.vector is None:
                raise ValueError(f"{row.source}: {row.error}")
            vectors.append(row.vector[None])
        return np.concatenate(vectors)

    def iter_windows(
        self, sources: Iterable[Source], *, pooling: Pooling = "none", overlap: float = 0.0, batch_size: int = 32,
        num_workers: int = 0, _fill: bool = True,
    ) -> Iterator[EmbeddingRow]:  # fmt: skip
        """Embed paths and clips of any length in order, keeping only a batch of windows in memory.

        Args:
            sources: what to embed.
            pooling: "none" yields a row every (1 - overlap) · `clip_s`, and one that ends with the
                file. Otherwise each file has one row, as in `embed_audio`.
            overlap: of consecutive windows, from 0 to below 1.
            batch_size: in windows.
            num_workers: decoding processes that work ahead (0: none).

        Yields:
            Rows with a vector. An error yields a row with the reason and without a vector, after
            the windows before it.
        """
        if pooling not in ("none", "mean", "center") or not 0 <= overlap < 1:
            raise ValueError(
                "expected pooling none, mean or center, and an overlap from 0 to below "
                f"1, found {pooling!r} and {overlap}"
            )
        windows = read_windows(
            [*sources],
            self.config.audio,
            pooling,
            overlap,
            num_workers=num_workers,
            ahead=batch_size,
        )
        rows = self._embed_windows(windows, batch_size, _fill)
        if pooling == "none":
            return (row for row in rows if row.vector is not None or row.error)
        return _pool(rows)

    def _embed_windows(
        self, windows: Iterator[Window], batch_size: int, fill: bool
    ) -> Iterator[EmbeddingRow]:
        """Set the vectors of `read_windows`' rows that have waveforms."""
        # Rows that were read and not yielded yet, in order: batches are read ahead.
        pending: deque[EmbeddingRow] = deque()

        def read_waveforms() -> Iterator[torch.Tensor]:
            for row, waveform in windows:
                pending.append(row)
                if waveform is not None:
                    yield waveform

        for features in audio_batches(self.model, read_waveforms(), batch_size, fill):
            for vector in features.cpu().numpy():
                # Ends of sources have no vector.
                while (row := pending.popleft()).is_end:
                    yield row
                if np.isfinite(vector).all():
                    row.vector = vector
                else:
                    row.error = "its embedding is NaN or infinite"
                yield row
        yield from pending

    def embed_text(self, texts: str | Sequence[str], *, batch_size: int = 32) -> Array:
        """Embed texts: (n, dim) float32, rows of length 1.

        Raises ValueError for a blank text, or if the model has no tokenizer.
        """
        captions = _as_list(texts, "texts")
        fill = not isinstance(texts, str)
        features = embed_text(
            self.model, captions, self.tokenizer, self.context_length, batch_size, fill
        )
        return features.cpu().numpy()

    def class_embeddings(
        self, labels: Sequence[str], templates: Sequence[str] = TEMPLATES
    ) -> Array:
        """Embed labels as in zero-shot evaluation: (len(labels), dim) float32, rows of length 1.

        Each is the normalized mean over templates, whose {} becomes the label, with spaces for
        underscores (`dog_bark`).
        """
        names = _as_list(labels, "labels")
        if isinstance(labels, str) or not names or len(set(names)) < len(names):
            raise ValueError(f"labels: expected a list of distinct texts, found {labels!r}")
        sentences = _as_list(templates, "templates")
        if not sentences or not all("{}" in text for text in sentences):
            raise ValueError(
                f"templates: expected a list of texts with {{}} in the label's place, found {templates!r}"
            )
        # Each label is a class with one name.
        captions = class_captions({label: [in_words(label)] for label in names}, sentences)
        text = torch.from_numpy(self.embed_text([*chain(*captions)]))
        return class_features(captions, text).numpy()

    def classify(
        self, audio: Audio | Sequence[Audio], labels: Sequence[str], templates: Sequence[str] = TEMPLATES,
        sample_rate: float | None = None, **options: Any,
    ) -> Array:  # fmt: skip
        """Compute the probabilities of two or more labels per sound, (n, len(labels)) float32.

        They are the softmax of the logit scale times the cosines with `class_embeddings`.
        `options` are those of `embed_audio`.
        """
        classes = self.class_embeddings(labels, templates)
        return self.probabilities(self.embed_audio(audio, sample_rate, **options), classes)

    def probabilities(self, audio: Array, classes: Array) -> Array:
        """Compute probabilities from embeddings of sounds (n, dim) and classes (K, dim): (n, K)
        float32."""
        # In double precision, because the scale multiplies roundings by up to 100.
        cosines = torch.tensor(audio).double() @ torch.tensor(classes).double().T
        scale = self.model.logit_scale.detach().cpu().double().exp()
        return (scale * cosines).softmax(dim=1).float().numpy()


def _pool(rows: Iterator[EmbeddingRow]) -> Iterator[EmbeddingRow]:
    """Merge each file's window rows and end row, which has its length and no vector, into one
    row."""
    vectors: list[Array] = []
    error = ""
    for row in rows:
        error = error or row.error
        if row.vector is not None:
            vectors.append(row.vector)
        if row.is_end:
            pooled = vectors[0] if vectors else None
            if len(vectors) > 1:
                # A mean's direction is the sum's.
                total: Any = np.sum(vectors, axis=0, dtype=np.float64)
                pooled = (total / np.linalg.norm(total)).astype(np.float32)
            if error:
                pooled = None
            yield EmbeddingRow(row.source, 0.0, row.end_s, pooled, error)
            vectors = []
            error = ""


def _as_list(texts: Any, name: str) -> list[str]:
    """Return a text as a list of one, or texts as a list.

    Raises ValueError for one that is blank or isn't a `str`.
    """
    is_single = isinstance(texts, str | bytes) or not isinstance(texts, Iterable)
    captions = [texts] if is_single else [*texts]
    for number, text in enumerate(captions):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"{name}[{number}]: expected texts, not blank, found {type(text).__name__} {text!r:.60}"
            )
    return captions


def _is_single_sound(audio: Any) -> bool:
    """Return whether an argument is one sound rather than a sequence of sounds."""
    if isinstance(audio, Source | bytes | Mapping):
        return True
    # A binary file, or a decoder of torchcodec.
    if hasattr(audio, "read") or hasattr(audio, "get_all_samples"):
        return True
    # An array of samples, maybe with channels. Lists have no `ndim`.
    return getattr(audio, "ndim", 3) < 3


def _as_source(
    name: str, audio: Any, sample_rate: float | None, channels_first: bool | None
) -> Source:
    """Return a sound as what `read_windows` takes. Raises ValueError if it isn't one."""
    if isinstance(audio, Source):
        return audio
    if hasattr(audio, "read"):
        audio = audio.read()
    if isinstance(audio, bytes):
        return AudioInput(name, audio)
    if hasattr(audio, "get_all_samples"):  # torchcodec's decoder, as in `datasets`
        decoded = audio.get_all_samples()
        return _from_array(name, decoded.data, decoded.sample_rate, channels_first=True)
    if isinstance(audio, Mapping):
        # `datasets` places channels first.
        channels_first = channels_first is not False
        sample_rate = audio.get("sampling_rate")
        return _from_array(name, audio.get("array"), sample_rate, channels_first)
    return _from_array(name, audio, sample_rate, channels_first)


def _from_array(
    name: str, samples: Any, sample_rate: float | None, channels_first: bool | None
) -> AudioInput:
    """Return samples with channels first. Raises ValueError for other shapes, types and rates."""
    # A tuple is the (samples, rate) of other libraries, which NumPy would convert to an array.
    array = np.empty(()) if isinstance(samples, tuple) else np.asarray(samples)
    rows = array
    if array.ndim == 1:
        rows = array[None]
    elif channels_first is False:
        rows = array.T
    # In LAION-CLAP, (N, T) are N mono clips, so more channels must be confirmed.
    max_channels = 2 if channels_first is None else MAX_CHANNELS
    if rows.ndim != 2 or not 0 < len(rows) <= max_channels:
        raise ValueError(
            f"{name}: expected a path, samples (T,), (1, T) or stereo (2, T), or a dict "
            f"of them, found {type(samples).__name__} of shape {array.shape}. Pass mono "
            f"clips as a list: list(array). Pass one sound of at most {MAX_CHANNELS} "
            "channels with channels_first=True, or False if it is (T, channels)"
        )
    if array.dtype.kind != "f" and array.dtype != np.int16:
        raise ValueError(
            f"{name}: expected samples in floating point or int16, found {array.dtype}"
        )
    if not sample_rate or sample_rate < 0 or sample_rate % 1:
        raise ValueError(
            f"sample_rate: expected that of the array {name}, in Hz, found {sample_rate!r}"
        )
    if array.dtype != np.int16:
        rows = rows.astype(np.float32, copy=False)
    return AudioInput(name, rows, int(sample_rate))


def load(
    source: str | Path, *, best: bool = False, device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32", tokenizer: str | None = None, preset: str | None = None,
) -> Clap:  # fmt: skip
    """Load a trained model for embedding and classification. Raises ValueError if that fails.

    Args:
        source: a checkpoint of this project, or a folder of them; a folder for
            `transformers.ClapModel`, or its Hub id (this host's cache first); a file of LAION-CLAP
            or open_clip.
        best: take a folder's best checkpoint by `best_metric` instead of the newest.
        device: default: a GPU if available, else the CPU.
        dtype: the model's computation in float32, bfloat16 or float16; embeddings are float32.
        tokenizer: Hub name or folder (default: the checkpoint's).
        preset: expected sizes: a preset's name or path.
    """
    target = torch.device(device or choose_accelerator())
    if target.type == "cuda":
        set_up_cuda()
    model_dtype = getattr(torch, str(dtype).removeprefix("torch."))
    weights = load_weights(source, load_preset(preset) if preset else None, best=best)
    clap = Clap(weights, target, model_dtype, tokenizer)
    if tokenizer is not None:
        clap.tokenizer  # noqa: B018  (detects a wrong name early)
    return clap
