"""What a model heard, by what `clap-evaluate --predictions` wrote: to look at, and its worst and best clips to listen to.

Sounds are copied as they lie in the shards. A predictions file may be anybody's: it can have nothing read but sounds in tars.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from clap_ds.analysis.figure import COLORS, COLUMN_WIDTH_INCHES, Blocks, Figure, Picture, styled
from clap_ds.analysis.table import markdown_table, plain_text
from clap_ds.config.errors import UserError
from clap_ds.config.files import open_regular, read_object

TITLE = "CLAP training: what a model hears"
NUM_WORST, NUM_BEST, NUM_PAIRS = 20, 5, 20
MOST_DRAWN, MOST_NAMED = 60, 12  # classes of a confusion matrix; of a map, or of a matrix with numbers
MOST_BYTES, MOST_BYTES_OF_ALL = 3 * 2**20, 18 * 2**20  # of a sound and of a page's: 24 MiB as text, which mail takes
FORMATS = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3", b"\xff": "mp3"}
Count = Annotated[int, Field(ge=0, lt=2**53)]


class Match(BaseModel):
    score: FiniteFloat
    rank: FiniteFloat


class Clip(BaseModel):
    clip: str
    of: Annotated[dict[str, Match], Field(min_length=1)]
    best: dict[str, Match]
    at: tuple[FiniteFloat, FiniteFloat, FiniteFloat]
    place: tuple[Count, Count]

    @property
    def judged(self) -> tuple[str, Match, str, Match]:
        """Of its labels the one that was ranked best, and the best that isn't its own; an empty one where all the best are."""
        other = next((each for each in self.best.items() if each[0] not in self.of), ("", Match(score=-1, rank=0)))
        return *min(self.of.items(), key=lambda each: each[1].rank), *other


class ZeroShot(BaseModel):
    clips: list[Clip]
    confusion: dict[str, list[Count]]


class Predictions(BaseModel):
    checkpoint: str
    model: str
    retrieval: list[Clip] = []
    zero_shot: ZeroShot = ZeroShot(clips=[], confusion={})

    @model_validator(mode="after")
    def _check(self) -> Predictions:
        clips, classes = self.zero_shot.clips, self.zero_shot.confusion
        is_square = {len(row) for row in classes.values()} == ({len(classes)} if clips else set())
        if not is_square or not (clips or self.retrieval):
            raise ValueError("no clips, or classes without a row and a column each in zero_shot.confusion")
        return self


def read_predictions(path: Path) -> Predictions | None:
    """None for what doesn't begin as an evaluation's results; a UserError for what does, and isn't `--predictions`'."""
    try:
        with open_regular(path) as file:
            if not re.match(rb'(\xef\xbb\xbf)?\s*\{\s*"checkpoint"\s*:', file.read(1000)):
                return None
        return Predictions.model_validate(read_object(path))
    except OSError:
        return None  # whoever reads runs says so
    except ValidationError as error:
        where, why = ".".join(map(str, error.errors()[0]["loc"])) or "file", error.errors()[0]["msg"]
        raise UserError(f"{path}: expected what --predictions wrote: {where}: {why}") from None


class Sounds:
    """Copies of clips' audio in a folder, as long as there is room for more on a page."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._left, self._number = folder, MOST_BYTES_OF_ALL, 0

    def copy(self, clip: Clip) -> str:
        """The name of its copy; a ValueError, OSError or TarError that says why there is none."""
        (start, size), (shard, _, key) = clip.place, clip.clip.rpartition(": ")
        if size > min(MOST_BYTES, self._left):
            raise ValueError(f"its {size:,} bytes are too many for this page")
        with open_regular(shard) as file:
            file.seek(start - tarfile.BLOCKSIZE)
            header = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
            sound = file.read(size)
        kind = next((kind for begin, kind in FORMATS.items() if sound.startswith(begin)), "")
        name = header.name.encode("utf-8", "surrogateescape")  # as much as fits; by Python's tarfile in ASCII
        is_it = any(name.startswith(f"{key}.".encode(coding, "replace")[:100]) for coding in ("utf-8", "ascii"))
        if not (is_it and kind and header.size == size):
            raise ValueError("at its place in the shard is no such sound")
        self._left, self._number = self._left - size, self._number + 1
        (copy := self._folder / f"clip-{self._number}.{kind}").write_bytes(sound)
        return copy.name


def words(text: str) -> str:
    """Somebody's text in one line of which Markdown makes nothing."""
    return re.sub(r"([\\*~&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", plain_text(_short(text, 200)))


def _short(text: str, most: int = 28) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def blocks(predictions: Predictions, sounds: Sounds, number: int) -> Blocks:
    """Of one file, the `number`th of its page."""
    yield f"By {words(predictions.model)} of {words(predictions.checkpoint)}."
    clips = predictions.zero_shot.clips or predictions.retrieval
    kinds = ["clips"] * len(clips)
    if predictions.zero_shot.clips:
        yield from _classes(predictions.zero_shot.confusion, number)
        kinds = [next(iter(clip.of)) for clip in clips]
    caption = "The clips' embeddings on their first two principal axes"
    yield Figure(f"map-{number}.png", caption, draw_map([clip.at for clip in clips], kinds))
    for task, clips in (("Zero-shot", predictions.zero_shot.clips), ("Retrieval", predictions.retrieval)):
        ordered = sorted(clips, key=lambda clip: (-clip.judged[1].rank, clip.judged[1].score - clip.judged[3].score))
        if clips:
            yield f"### {task}: the worst clips"
            right = [f"{sum(clip.judged[1].rank <= k for clip in clips) / len(clips):.1%}" for k in (1, 5, 10)]
            yield f"Right in the best 1, 5 and 10: {', '.join(right)} of {len(clips)} clips.".replace("%", " %")
            yield from _cards(ordered[:NUM_WORST], sounds)
        if best := ordered[NUM_WORST:][: -NUM_BEST - 1 : -1]:
            yield f"### {task}: the best clips"
            yield from _cards(best, sounds)


def _classes(confusion: Mapping[str, Sequence[int]], number: int) -> Blocks:
    """Each class, worst first, the matrix unless it has too many, and what was confused most."""
    pairs = [(count, sum(row), name, other) for name, row in confusion.items()
             for other, count in zip(confusion, row, strict=True)]  # fmt: skip
    right = sorted((count / total, -total, name) for count, total, name, other in pairs if total and name == other)
    shown = [(words(name), str(-total), f"{100 * share:.1f}") for share, total, name in right]
    yield markdown_table(["class", "clips", "% right"], shown)
    if len(confusion) <= MOST_DRAWN:
        caption = "What the clips of each class (row) were taken for: the darker, the more of them"
        name = f"{'confusion' if len(confusion) > 20 else 'matrix'}-{number}.png"  # the former is larger on the page
        yield Figure(name, caption, draw_confusion(confusion))
    wrong = sorted((-count, total, name, other) for count, total, name, other in pairs if count and name != other)
    if wrong:
        rows = ((words(name), words(other), f"{-count} of {total}") for count, total, name, other in wrong[:NUM_PAIRS])
        yield markdown_table(["most confused: clips of", "taken for", "times"], rows)


def _cards(clips: Iterable[Clip], sounds: Sounds) -> Iterator[str]:
    """Of each clip a player, what it is, and what was ranked above it, or next."""
    for clip in clips:
        label, own, other, match = clip.judged
        where = "above it" if own.rank > 1 else "next"
        beside = f"{where} **{words(other)}**, {match.score:.3f} " if match.rank else ""
        told = f"**{words(label)}**: rank {own.rank:g}, score {own.score:.3f}; {beside}({words(clip.clip)})"
        try:
            yield f"![{told}]({sounds.copy(clip)})"
        except (OSError, ValueError, tarfile.TarError) as error:
            yield f"{told}. No sound: {words(getattr(error, 'strerror', None) or str(error))}."


@styled()
def draw_confusion(confusion: Mapping[str, Sequence[int]]) -> Picture:
    """Shares of each row, as shades; of few classes the numbers, too."""
    names = [_short(name) for name in confusion]
    side = 0.2 + 0.15 * len(names) + 0.08 * max(map(len, names))
    picture = Picture((side,), columns_wide=max(1.0, side / COLUMN_WIDTH_INCHES))
    axes, shares = picture.panels[0], [[count / (sum(row) or 1) for count in row] for row in confusion.values()]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="taken for", ylabel="clips of")
    axes.grid(visible=False)
    for y, row in enumerate(confusion.values() if len(names) <= MOST_NAMED else ()):
        for x, count in enumerate(row):
            axes.text(x, y, str(count), ha="center", va="center", color="white" if shares[y][x] > 0.5 else "black")
    return picture


@styled()
def draw_map(places: Sequence[tuple[float, float, float]], kinds: Sequence[str]) -> Picture:
    """Points of two coordinates and a distance from that plane, coloured by kind, the rarest alike where there are many."""
    axes = (picture := Picture((2.6,), columns_wide=1.5)).panels[0]
    number = {kind: min(n, MOST_NAMED) for n, (kind, _) in enumerate(Counter(kinds).most_common())}
    for n, name in enumerate([*number][:MOST_NAMED] + ["others"] * (len(number) > MOST_NAMED)):
        color, marker = (COLORS[n % 6], "os^DvP"[(n + n // 6) % 6]) if n < MOST_NAMED else ("0.8", ".")
        own = [place for place, kind in zip(places, kinds, strict=True) if number[kind] == n]
        x, y, _ = zip(*own, strict=True)
        label = _short(name).lstrip("_")  # matplotlib names nothing that begins so
        axes.plot(x, y, linestyle="", markersize=2.5, zorder=3 - n / 100, label=label, color=color, marker=marker)
    first, second, off = (sum(place[n] ** 2 for place in places) for n in range(3))
    for name_axis, part in ((axes.set_xlabel, first), (axes.set_ylabel, second)):
        name_axis(f"principal axis, {100 * part / ((first + second + off) or 1):.0f} % of the variance")
    picture.name_below(axes, columns=3)
    return picture
