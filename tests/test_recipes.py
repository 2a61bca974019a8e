"""Every command of docs/recipes.md runs to a score, on small folders of the five data sets' published layouts."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.evaluation.metrics import evaluate_retrieval
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import train_tokenizer
from clap_ds.ranks.distributed import Ranks
from tests import processes
from tests.data.builds import items_by_source
from tests.training.training_commands import ROOT, environment
from tests.weights.fake_checkpoints import checkpoint_of

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "console" for line in block.splitlines()]
WEIGHTS = "630k-audioset-best.pt"
FEWER = {"1 2 3 4 5": "1 2", "2 3 4 5": "2"}  # folds of ESC-50 that are built, trained and tested
PROGRAMS = {"clap-shards": "clap_ds.shards", "clap-evaluate": "clap_ds.evaluate", "deepspeed": "clap_ds.train"}
TINY = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": False},
    "scheduler": {"params": {"total_num_steps": 2, "warmup_num_steps": 1}},
    "clap": {
        "model": {"preset": "micro"},
        "text_tokens": 16,
        "data": {"tokenizer": "tokenizer", "num_workers": 0, "shuffle_buffer": 8},
        "train": {"samples": 8},
        "checkpoint": {"every_steps": 2},
        "evaluation": {"every_steps": 2},
    },
}
"""What is another here than in the document's runs."""
ENCODINGS = ("PCM_16", "PCM_32", "FLOAT", "PCM_U8", "PCM_24", "DOUBLE", "MS_ADPCM", "IMA_ADPCM")
CLOTHO_NAMES = ("Sheep (Ram) - 2; far.wav", "it's 5 o'clock, rain.wav", "Bäcker #3.wav", "a  b_wav_48000 .wav")
CLASSES = {
    "esc": ("dog", "chirping_birds", "door_wood_knock"),
    "us8k": ("air_conditioner", "gun_shot"),
    "fsd": ("Bark,Dog,Animal", "Chink_and_clink,Glass", "Animal", "Electric_guitar,Guitar"),
}


def write_list(path: Path, header: str, rows: Iterable[Iterable[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    quoted = (",".join(f'"{cell}"' if re.search("[,;]", str(cell)) else str(cell) for cell in row) for row in rows)
    path.write_text("\n".join([header, *quoted]) + "\n", encoding="utf-8")


class Sounds:
    """Writes noises, no two alike, each in the next of `ENCODINGS`, in one or two channels."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, path: Path, seconds: float = 0.2) -> str:
        self.number += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(self.number).uniform(
            -0.5, 0.5, (round(seconds * 44100), 1 + self.number // 8 % 2)
        )
        soundfile.write(path, noise, 44100, subtype=ENCODINGS[self.number % 8])
        return path.name


def write_data_sets(place: Path) -> None:
    """All five, as they are unpacked; AudioCaps without a sound that can't be downloaded any more."""
    sound, header = Sounds(), "audiocap_id,youtube_id,start_time,caption"
    for split, ids, each in (("train", "-abcdefg", 1), ("val", "hij_", 5), ("test", "klmn", 5)):
        rows = [(n, f"{i}zJq7n_U{n}", 30, f"Ducks quack, {i} and {k}") for n, i in enumerate(ids) for k in range(each)]
        write_list(place / f"audiocaps/dataset/{split}.csv", header, rows)
        for name in sorted({row[1] for row in rows})[split == "train" :]:
            sound(place / f"audiocaps/audio/{name}.wav")
    header = ",".join(["file_name", *(f"caption_{k}" for k in range(1, 6))])
    for split in ("development", "validation", "evaluation"):
        rows = [(name, *(f"A wind; gusty, {split} {n} {k}." for k in range(5))) for n, name in enumerate(CLOTHO_NAMES)]
        write_list(place / f"clotho/clotho_captions_{split}.csv", header, rows)
        for name in CLOTHO_NAMES:
            sound(place / "clotho" / split / name, seconds=1.5)  # longer than the model's clips
    rows = [
        (
            sound(place / f"ESC-50-master/audio/{fold}-{n}-A-{n % 3}.wav"),
            fold,
            n % 3,
            CLASSES["esc"][n % 3],
            n < 3,
            n,
            "A",
        )
        for fold in range(1, 6)
        for n in range(6)
    ]
    write_list(place / "ESC-50-master/meta/esc50.csv", "filename,fold,target,category,esc10,src_file,take", rows)
    root = place / "UrbanSound8K"
    rows = [
        (sound(root / f"audio/fold{fold}/{fold}00-{n}-0-0.wav"), f"{fold}00", 0.0, 0.2, 1, fold, n, CLASSES["us8k"][n])
        for fold in range(1, 11)
        for n in range(2)
    ]
    write_list(root / "metadata/UrbanSound8K.csv", "slice_file_name,fsID,start,end,salience,fold,classID,class", rows)
    for side, first, split in (("dev", 100, True), ("eval", 200, False)):
        rows = [
            (first + n, CLASSES["fsd"][n % 4], "/m/0,/m/1") + ("train", "val")[n % 2 : n % 2 + 1] * split
            for n in range(12)
        ]
        write_list(place / f"FSD50K.ground_truth/{side}.csv", "fname,labels,mids" + ",split" * split, rows)
        for row in rows:
            sound(place / f"FSD50K.{side}_audio/{row[0]}.wav")


def merged(into: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {name: merged(into.get(name) or {}, value) for name, value in changes.items() if isinstance(value, dict)}
    return {**into, **changes, **nested}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets, LAION's weights of random numbers, and the document's runs with `TINY` in them."""
    folder = tmp_path_factory.mktemp("recipes")
    write_data_sets(folder)
    train_tokenizer(
        ["Ducks quack", "A wind; gusty", *(name for names in CLASSES.values() for name in names)], folder / "tokenizer"
    )
    torch.manual_seed(0)
    checkpoint_of(ClapModel(load_preset("micro")), folder / WEIGHTS, tokenizer=folder / "tokenizer")
    template = json.loads((ROOT / "ds_configs" / "fine_tune.json").read_text())
    runs = [block for kind, block in BLOCKS if kind == "json"]
    for name, block in zip(re.findall(r"`(\w+\.json)`[^`]*\n\n```json", PAGE), runs, strict=True):
        content = merged(merged(template, json.loads(block)), TINY)
        (folder / name).write_text(json.dumps(content, indent=2))
    return folder


def typed(line: str, place: Path) -> str:
    """Type a line, and give what it prints."""
    for folds, fewer in FEWER.items():
        line = line.replace(f"in {folds};", f"in {fewer};")
    if loop := re.fullmatch(r"\$ for k in ([\d ]+); do (.*); done", line):
        return "".join(typed("$ " + loop[2].replace("$k", k), place) for k in loop[1].split())
    words = shlex.split(line.removeprefix("$ "))
    if words[0] == "sed":
        return subprocess.run(line.removeprefix("$ "), shell=True, cwd=place, check=True, text=True, stdout=-1).stdout
    script = ["clap_ds/train.py"] * (words[0] == "deepspeed")
    assert words[1 : 1 + len(script)] == script
    arguments = []
    for word in words[1 + len(script) :]:
        found = sorted(map(str, place.glob(word))) if re.search(r"^[^/]*\?|-checkpoints$", word) else [word]
        arguments += [str(Path(name).relative_to(place)) if name.startswith(str(place)) else name for name in found]
    done = processes.run(["-m", PROGRAMS[words[0]], *arguments], cwd=place, env=environment(), check=True)
    return done.stdout + done.stderr


SAID = {
    "build audiocaps/dataset/train.csv": ["train: 7 items", "1 left out"],
    "build audiocaps/dataset/val.csv": ["held_out: 4 items"],
    "build audiocaps/dataset/test.csv": ["held_out: 4 items"],
    "build clotho/clotho_captions_development.csv": ["train: 4 items"],
    "build clotho/clotho_captions_validation.csv": ["held_out: 4 items"],
    "build clotho/clotho_captions_evaluation.csv": ["held_out: 4 items"],
    f"{WEIGHTS} --retrieval 'shards/clotho_test/*.tar'": ["retrieval (4 clips, 20 captions)"],
    "captions.json": ["step 2/2"],
    "--retrieval 'shards/audiocaps_test/*.tar'": ["retrieval (4 clips, 20 captions)"],
    "--best --retrieval 'shards/clotho_test/*.tar'": ["retrieval (4 clips, 20 captions)"],
    "build ESC-50-master/meta/esc50.csv": ["held_out: 6 items", "train: 24 items"] * 2,
    f"{WEIGHTS} --zero_shot 'shards/esc50_1/*.tar'": ["zero-shot classification (30 clips, 3 classes)"],
    "for k in 1 2 3 4 5; do deepspeed": ["step 2/2"] * 2,
    "runs/esc50_$k-*-checkpoints": ["zero-shot classification (6 clips, 3 classes)"] * 2,
    "--folds": ["zero_shot_top1: "],
    "build UrbanSound8K/metadata/UrbanSound8K.csv": ["held_out: 2 items", "train: 18 items"],
    f"{WEIGHTS} --zero_shot 'shards/us8k_1/*.tar'": ["zero-shot classification (20 clips, 2 classes)"],
    "build FSD50K.ground_truth/dev.csv": ["held_out: 6 items", "train: 6 items"],
    "build FSD50K.ground_truth/eval.csv": ["held_out: 12 items"],
    f"{WEIGHTS} --zero_shot 'shards/fsd50k_test/*.tar'": ["zero-shot classification (12 clips, 7 classes)"],
    "--deepspeed_config fsd50k.json": ["step 2/2"],
    "--best --zero_shot 'shards/fsd50k_test/*.tar'": ["mean average precision", "(12 clips, 7 classes)"],
}
"""Part of a line → what it prints."""


@pytest.mark.end_to_end
def test_every_command_leads_to_a_score(place: Path) -> None:
    used = set()
    for line in COMMANDS:
        shown = typed(line, place)
        of = [part for part in SAID if part in line]
        used.update(of)
        assert len(of) == (" > " not in line), line
        for said in set(SAID[of[0]] if of else ()):
            assert shown.count(said) == SAID[of[0]].count(said), f"{line}\n{shown}"
        assert "warning:" not in shown, f"{line}\n{shown}"
    assert used == {*SAID}
    esc, us8k, fsd = (items_by_source(place / "shards" / name) for name in ("esc50_1", "us8k_1", "fsd50k_test"))
    assert {name: described(esc[name])["category"] for name in esc} == {
        f"{fold}-{n}-A-{n % 3}.wav": CLASSES["esc"][n % 3] for fold in range(1, 6) for n in range(6)
    }
    assert (described(us8k["700-1-0-0.wav"])["class"], described(us8k["700-1-0-0.wav"])["caption"]) == (
        "gun_shot",
        "gun shot",
    )
    assert described(fsd["201.wav"])["labels"] == ["Chink_and_clink", "Glass"]
    assert described(fsd["201.wav"])["caption"] == ["Chink and clink", "Glass"]


def described(item: dict[str, bytes]) -> dict[str, Any]:
    return {**json.loads(item["json"])}


def test_retrieval_is_measured_as_in_laions_paper() -> None:
    """What the papers' code does, in numpy: a caption's rank of its clip; of a clip's five captions the best one's rank, and
    the precision at each that is among the first ten, over five."""
    audio, text = (
        torch.nn.functional.normalize(torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), dim=-1)
        for n in (30, 150)
    )
    found = evaluate_retrieval(audio, text, torch.arange(30).repeat_interleave(5), Ranks(0, 1, 0, 1))
    scores = audio.double().numpy() @ text.double().numpy().T
    for k in (1, 5, 10):
        of_text = [(scores[:, m] > scores[m // 5, m]).sum() for m in range(150)]
        of_audio = [sorted((scores[n] > scores[n, m]).sum() for m in range(5 * n, 5 * n + 5)) for n in range(30)]
        assert found[f"retrieval_text_to_audio_r{k}"].value == pytest.approx(np.mean(np.array(of_text) < k))
        assert found[f"retrieval_audio_to_text_r{k}"].value == pytest.approx(
            np.mean([ranks[0] < k for ranks in of_audio])
        )
    first_ten = [sum((n + 1) / (rank + 1) for n, rank in enumerate(ranks) if rank < 10) / 5 for ranks in of_audio]
    assert found["retrieval_audio_to_text_map10"].value == pytest.approx(np.mean(first_ten))
