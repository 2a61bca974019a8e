"""What a model heard, on a page: predictions of a known law made by the evaluation's own code; hostile ones; in a browser."""

import io
import json
import queue
import re
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F

from clap_ds.analysis import look, report
from clap_ds.config.errors import UserError
from clap_ds.evaluation.clips import list_clips
from clap_ds.evaluation.predictions import by_class, of_clips
from tests import needs
from tests.analysis.samples import DATA, command, write
from tests.data.tars import write_tar

NAMES = ["dog", "rain_on_a_roof", "siren"]
TAKEN_FOR = [[7, 2, 1], [0, 9, 1], [5, 0, 5]]
SOUNDS: dict[str, bytes] = {}
for kind, subtype in (("wav", "FLOAT"), ("flac", None), ("ogg", None), ("mp3", None)):
    soundfile.write(half_a_second := io.BytesIO(), np.sin(np.arange(24000) / 9) / 9, 48000, subtype, format=kind)
    SOUNDS[kind] = half_a_second.getvalue()


def predictions(folder: Path, names: list[str] = NAMES, key: str = "{}") -> dict[str, Any]:
    """Of 30 clips in a tar, each of a class (row of `TAKEN_FOR`) and nearest to one (column); as zero-shot and as retrieval."""
    pairs = [(n, m) for n, row in enumerate(TAKEN_FOR) for m, count in enumerate(row) for _ in range(count)]
    members = [(f"{key.format(n)}.{[*SOUNDS][n % 4]}", [*SOUNDS.values()][n % 4]) for n in range(30)]
    clips, _ = list_clips([str(write_tar(folder / "clips.tar", members))])
    one_hot = torch.eye(3, dtype=torch.float64)
    audio = F.normalize(torch.stack([0.5 * one_hot[n] + one_hot[m] for n, m in pairs]))
    found = of_clips(clips, [[n] for n, _ in pairs], names, audio, one_hot)
    return {"checkpoint": "runs/x", "model": "micro", "retrieval": found, "zero_shot": by_class(found, names)}


def reported(patch: pytest.MonkeyPatch, folder: Path, content: Any, *more: Path) -> tuple[str, str]:
    """Markdown and HTML of a report on this."""
    file = write(folder / "heard.out", json.dumps(content))  # told by what is in it
    command(patch, report.main, *more, file, "--output", folder / "out")
    return (folder / "out/report.md").read_text(), (folder / "out/report.html").read_text()


def test_classes_confusions_and_clips_are_the_predictions_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = predictions(tmp_path)
    assert [*content["zero_shot"]["confusion"].values()] == TAKEN_FOR
    text, page = reported(monkeypatch, tmp_path, content, DATA / "record_2ranks")
    text = text.partition("## What was heard: ")[2]  # behind the run's sections
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[2:5] == [["siren", "10", "50.0"], ["dog", "10", "70.0"], ["rain_on_a_roof", "10", "90.0"]]
    assert rows[7:9] == [["siren", "dog", "5 of 10"], ["dog", "rain_on_a_roof", "2 of 10"]]
    assert text.count("in the best 1, 5 and 10: 70.0 %, 100.0 %, 100.0 % of 30 clips") == 2
    worst, best = re.findall(r"### Zero-shot: the (?:worst|best) clips\n(.*?)(?=###)", text, re.DOTALL)
    cards = re.findall(r"!\[(.*)\]\((clip-\d+)\.(\w+)\)", worst)
    assert (len(cards), best.count("![**"), page.count("<audio")) == (20, 5, 50)
    assert all(own != other for own, other in re.findall(r"\*\*(.*)\*\*: rank 1, score 1.000; next \*\*(.*)\*\*", best))
    told = "**dog**: rank 2, score 0.447; above it **rain_on_a_roof**, 0.894"
    assert cards[0][0] == f"{told} ({tmp_path}/clips.tar: 7)"
    for number, (told, name, kind) in enumerate(cards):
        key = int(told.rpartition(": ")[2].strip(")"))
        assert (kind, ("rank 2" in told)) == ([*SOUNDS][key % 4], number < 9)
        assert (tmp_path / f"out/{name}.{kind}").read_bytes() == SOUNDS[kind]


def test_pictures_have_the_numbers_and_what_they_stand_for() -> None:
    matrix = look.draw_confusion(dict(zip(NAMES, TAKEN_FOR, strict=True))).panels[0]
    np.testing.assert_allclose(matrix.images[0].get_array(), np.array(TAKEN_FOR) / 10)
    assert [text.get_text() for text in matrix.texts] == [str(n) for row in TAKEN_FOR for n in row]
    assert [label.get_text() for label in matrix.get_yticklabels()] == NAMES
    kinds = [f"_{n}" for n in range(30) for _ in range(30 - n)]
    axes = look.draw_map([(2.0, 1.0, 2.0)] * len(kinds), kinds).panels[0]
    assert [line.get_label() for line in axes.lines] == [*map(str, range(12)), "others"]
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 13
    assert [len(line.get_xydata()) for line in axes.lines] == [*range(30, 18, -1), sum(range(19))]
    assert [axes.get_xlabel(), axes.get_ylabel()] == [f"principal axis, {n} % of the variance" for n in (44, 11)]


def test_many_classes_have_no_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, names = predictions(tmp_path), [f"class {n}" for n in range(527)]
    content["zero_shot"]["confusion"] = {name: [int(m == (n ^ 1)) for m in range(527)] for n, name in enumerate(names)}
    text, _ = reported(monkeypatch, tmp_path, content)
    assert "confusion-1.png" not in text
    assert (text.count("| 1 of 1 |"), text.count("     1 |     0.0 |")) == (20, 526)  # the last has no clip


def test_hostile_text_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = ["<script>alert(1)</script>", "](clip-1.wav)\r\n\r\n![x](clip-1.wav)"]
    evil.append("*a* _b_ &lt;img src=x&gt; [z](http://z)")
    content = predictions(tmp_path, evil, key="<svg onload=q>{}") | {"checkpoint": "<iframe>", "model": "<b>x"}
    text, page = reported(monkeypatch, tmp_path, content)
    body = page.partition("<body>")[2]
    tags = "h1 h2 h3 p div table thead tbody tr th td figure figcaption img audio strong"
    assert sorted({*re.findall(r"<(\w+)", body)}) == sorted(tags.split())
    assert all(each.startswith("data:") for each in re.findall(r'src="(.*?)"', body))
    assert not re.search("<(svg|script|iframe|b>)", text)  # nor where others make a page of it
    assert (body.count("<audio"), "<strong>*a* _b_ &amp;lt;img" in body) == (50, True)


def test_a_sound_that_cannot_be_had_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = predictions(tmp_path)
    (wav, flac, *_), _ = content["retrieval"], content.pop("zero_shot")
    tar, (start, size) = flac["clip"].removesuffix(": 1"), flac["place"]
    members = [("0.npy", b"\x93NUMPY"), ("ä" * 120 + ".wav", SOUNDS["ogg"]), ("ö.wav", SOUNDS["mp3"])]
    other = str(write_tar(tmp_path / "other.tar", members))
    (npy,), (long, short) = (list_clips([other], kind)[0] for kind in ("mel", "encoded"))
    cases = [
        (wav["clip"], wav["place"], "too many for this page"),
        (npy.name, npy.place, "no such sound"), (f"{tar}: 2", (start, size), "no such sound"),
        (f"{tar}: 1", (start, size - 1), "no such sound"), (f"{tar}: 1", (9, 9), "Invalid argument"),
        ("/etc/passwd: root", (512, 9), "header"), ("gone.tar: 1", (512, 9), "No such file or directory"),
        (long.name, long.place, ".ogg"), (short.name, short.place, ".mp3"), (f"{tar}: 1", (start, size), ".flac"),
        (f"{tar}: 1", (start, len(SOUNDS["wav"]) - 1), "too many for this page"),
    ]  # fmt: skip
    monkeypatch.setattr(look, "MOST_BYTES", len(SOUNDS["wav"]) - 1)
    monkeypatch.setattr(look, "MOST_BYTES_OF_ALL", len(SOUNDS["wav"]))
    content["retrieval"] = [flac | {"clip": name, "place": place} for name, place, _ in cases]
    text, _ = reported(monkeypatch, tmp_path, content)
    cards = [line for line in text.splitlines() if "**dog**" in line]
    for card, (_, _, said) in zip(cards, cases, strict=True):
        assert card.endswith(f"{said})" if said[0] == "." else f"{said}.")
        assert ("No sound: " in card) == (said[0] != ".")


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ('"retrieval": []}', "expected what --predictions wrote: file: Value error, no clips, or classes without"),
        ('"zero_shot": {"clips": [], "confusion": {"a": [1, 2]}}}', "file: Value error, no clips, or classes"),
        ('"retrieval": [{"of": {}}]}', "expected what --predictions wrote: retrieval.0.clip: Field required"),
        ('"ret', "found.json:1:35: not valid JSON"),
    ],
)
def test_what_only_begins_like_predictions_is_refused(tmp_path: Path, rest: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        look.read_predictions(write(tmp_path / "found.json", '{"checkpoint": "x", "model": "m", ' + rest))


STAGE = """<link rel="icon" href="data:,">
<iframe src="out/report.html" width="390" height="800"></iframe><script>onload = async () => {
const page = document.querySelector("iframe").contentDocument, sounds = [...page.querySelectorAll("audio")]
const known = sound => sound.readyState || sound.error || new Promise(done => sound.onloadedmetadata = sound.onerror = done)
await Promise.all(sounds.map(known))
fetch("told?" + encodeURIComponent(JSON.stringify({seconds: sounds.map(sound => sound.duration), rows: page.body.innerText,
  pictures: [...page.images].map(image => image.naturalWidth), over: page.documentElement.scrollWidth - 390})))}</script>"""


@pytest.mark.end_to_end
def test_in_a_browser_as_wide_as_a_phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.programs("chromium")
    reported(monkeypatch, tmp_path, predictions(tmp_path, [*NAMES[:2], "W" * 300]))
    write(tmp_path / "stage.html", STAGE), write(tmp_path / "told", "")
    asked: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda self, *_: asked.put(self.path))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        options.append(f"--user-data-dir={tmp_path}/c")
        url = f"http://127.0.0.1:{server.server_port}/stage.html"
        with open(tmp_path / "log", "wb") as log, subprocess.Popen(["chromium", *options, url], stderr=log) as browser:
            try:
                requests = [asked.get(timeout=120) for _ in range(3)]
            finally:
                browser.terminate()
                server.shutdown()
    assert requests[:2] == ["/stage.html", "/out/report.html"]  # and nothing else
    seen = json.loads(unquote(requests[2].removeprefix("/told?")))
    assert np.allclose(seen["seconds"], 0.5, atol=0.1)  # MP3 is padded
    assert (len(seen["seconds"]), len(seen["pictures"]), min(seen["pictures"]) > 0) == (50, 2, True)
    assert "rain_on_a_roof\t10\t90.0" in seen["rows"]
    assert seen["over"] <= 0
    assert "CONSOLE" not in (tmp_path / "log").read_text()  # errors, and what the page's policy refused
