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
from clap_ds.config.settings import load_run
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import train_tokenizer
from clap_ds.training.checks import problems_for_training
from tests import processes
from tests.data.builds import items_by_source
from tests.training.training_commands import ROOT, environment
from tests.weights.fake_checkpoints import checkpoint_of

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line.removeprefix("$ ") for kind, block in BLOCKS if kind == "console" for line in block.splitlines()]
PROGRAMS = {f"clap-{name}": f"clap_ds.{name}" for name in ("shards", "evaluate", "embed", "search")}
PROGRAMS["deepspeed"] = "clap_ds.train"
TINY = {  # what differs here from the document's runs; LAION's weights are random numbers of that preset's sizes
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": False},
    "scheduler": {"params": {"total_num_steps": 2, "warmup_num_steps": 1}},
    "clap": {
        "model": {"preset": "micro"},
        "text_tokens": 16,
        "data": {"tokenizer": "tokenizer", "num_workers": 0, "shuffle_buffer": 8},
        "train": {"samples": 8, "ema": 0.5},
    },
}
CAPTIONED = "retrieval (4 clips, 20 captions)"
CLASSIFIED = "zero-shot classification ({} clips, {} classes)".format
SAID = [  # part of what each command prints, in the document's order
    *("train: 7 items", "held_out: 4 items", "held_out: 4 items"),  # AudioCaps
    *("train: 4 items", "held_out: 4 items", "held_out: 4 items", CAPTIONED, "step 2/2", CAPTIONED, CAPTIONED),
    *("train: 24 items", CLASSIFIED(30, 3), "", "step 2/2", CLASSIFIED(6, 3), "zero_shot_top1: "),  # ESC-50
    *("30 files", ".wav", "train: 18 items", CLASSIFIED(20, 2), "20 files"),
    *("train: 6 items", "held_out: 12 items", CLASSIFIED(12, 7), "", "step 2/2", CLASSIFIED(12, 7), "24 files"),
]
ENCODINGS = ("PCM_16", "PCM_32", "FLOAT", "PCM_U8", "PCM_24", "DOUBLE", "MS_ADPCM", "IMA_ADPCM")
CLOTHO = ("Chris&#39; Elevator.wav", "Uh, Hi, Mom (rain).wav", "808 Kings Cross  steps.wav", "Bäcker's #3 - 05.10.wav")
ESC = ("dog", "chirping_birds", "door_wood_knock")
US8K = ("air_conditioner", "gun_shot")
FSD = ("Bark,Dog,Animal", "Chink_and_clink,Glass", "Animal", "Electric_guitar,Guitar")


def write_list(path: Path, header: str, rows: Iterable[Iterable[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    quoted = (",".join(f'"{cell}"' if re.search("[,;]", str(cell)) else str(cell) for cell in row) for row in rows)
    path.write_text("\n".join([header, *quoted]) + "\n", encoding="utf-8")


def sounds_in(folder: Path, names: Iterable[str], seconds: float = 0.2) -> None:
    """Noises, no two alike, each in the next encoding and at the next rate, in one or two channels."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        seed = [*str(folder / name).encode()]
        rate = (44100, 8000, 96000)[number % 3]
        noise = np.random.default_rng(seed).uniform(-0.5, 0.5, (round(seconds * rate), 1 + number // 8 % 2))
        soundfile.write(folder / name, noise, rate, subtype=ENCODINGS[number % 8])


def write_captioned(place: Path) -> None:
    """AudioCaps without a sound that can't be had any more; Clotho's clips are longer than the model's."""
    header = "audiocap_id,youtube_id,start_time,caption"
    for split, ids, each in (("train", "-abcdefg", 1), ("val", "hij_", 5), ("test", "klmn", 5)):
        rows = [(n, f"{i}zJq7n_U", 30, f"Ducks quack, {i} and {k}") for n, i in enumerate(ids) for k in range(each)]
        write_list(place / f"audiocaps/dataset/{split}.csv", header, rows)
        sounds_in(place / "audiocaps/audio", (f"{i}zJq7n_U.wav" for i in ids[split == "train" :]))
    header = ",".join(["file_name", *(f"caption_{k}" for k in range(1, 6))])
    for split in ("development", "validation", "evaluation"):
        rows = [(name, *(f"A wind; gusty, {split} {n} {k}." for k in range(5))) for n, name in enumerate(CLOTHO)]
        write_list(place / f"clotho/clotho_captions_{split}.csv", header, rows)
        sounds_in(place / "clotho" / split, CLOTHO, seconds=1.5)


def write_classified(place: Path) -> None:
    root, header = place / "ESC-50-master", "filename,fold,target,category,esc10,src_file,take"
    numbers = [(fold, n, n % 3) for fold in range(1, 6) for n in range(6)]
    rows = [(f"{fold}-{n}-A-{kind}.wav", fold, kind, ESC[kind], kind == 0, n, "A") for fold, n, kind in numbers]
    write_list(root / "meta/esc50.csv", header, rows)
    sounds_in(root / "audio", (row[0] for row in rows))
    root, header = place / "UrbanSound8K", "slice_file_name,fsID,start,end,salience,fold,classID,class"
    numbers = [(fold, n, 100 * fold + n) for fold in range(1, 11) for n in range(2)]
    slices = [(f"{source}-{n}-0-0.wav", source, 0.0, 0.2, 1, fold, n, US8K[n]) for fold, n, source in numbers]
    write_list(root / "metadata/UrbanSound8K.csv", header, slices)
    for fold in range(1, 11):
        sounds_in(root / f"audio/fold{fold}", (row[0] for row in slices if row[5] == fold))
    for side, first in (("dev", 100), ("eval", 200)):
        split = [("train",), ("val",)] if side == "dev" else [(), ()]
        clips = [(first + n, FSD[n % 4], "/m/0,/m/1", *split[n % 2]) for n in range(12)]
        header = "fname,labels,mids" + ",split" * (side == "dev")
        write_list(place / f"FSD50K.ground_truth/{side}.csv", header, clips)
        sounds_in(place / f"FSD50K.{side}_audio", (f"{clip[0]}.wav" for clip in clips))


def merged(into: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {name: merged(into.get(name) or {}, value) for name, value in changes.items() if isinstance(value, dict)}
    return {**into, **changes, **nested}


def write_runs(place: Path) -> None:
    """The document's JSON in the template, as it says, and `TINY` in that; weights and a tokenizer for them."""
    train_tokenizer(["Ducks quack", "A wind; gusty", *ESC, *US8K, *FSD], place / "tokenizer")
    torch.manual_seed(0)
    model = ClapModel(load_preset("micro"))
    checkpoint_of(model, place / "630k-audioset-best.pt", tokenizer=place / "tokenizer")
    template = json.loads((ROOT / "ds_configs" / "fine_tune.json").read_text())
    blocks = [block for kind, block in BLOCKS if kind == "json"]
    for name, block in zip(re.findall(r"`(\w+\.json)`[^`]*\n\n```json", PAGE), blocks, strict=True):
        (place / name).write_text(json.dumps(full := merged(template, json.loads(block))))
        assert problems_for_training(load_run(place / name), 1) == []
        (place / name).write_text(json.dumps(merged(full, TINY), indent=2))


def typed(command: str, place: Path) -> list[str]:
    """Type a command; what it prints, in a loop each time. Of ESC-50's folds the first two are built, trained and tested."""
    command = re.sub(r"\bin (1 2|2) [\d ]+;", r"in \1;", command)
    if loop := re.fullmatch(r"for k in ([\d ]+); do (.*); done", command):
        return [said for k in loop[1].split() for said in typed(loop[2].replace("$k", k), place)]
    program, *words = shlex.split(command)
    if program == "sed":
        return [subprocess.run(command, shell=True, cwd=place, check=True, text=True, stdout=subprocess.PIPE).stdout]
    arguments: list[str] = []
    for word in words[program == "deepspeed" :]:
        is_pattern = re.search(r"\?|-checkpoints$", word)
        arguments += sorted(map(str, place.glob(word))) if is_pattern else [word]
    done = processes.run(["-m", PROGRAMS[program], *arguments], cwd=place, env=environment(), check=True)
    return [done.stdout + done.stderr]


@pytest.mark.end_to_end
def test_every_command_leads_to_a_score(tmp_path: Path) -> None:
    write_captioned(tmp_path)
    write_classified(tmp_path)
    write_runs(tmp_path)
    for command, said in zip(COMMANDS, SAID, strict=True):
        for shown in typed(command, tmp_path):
            assert said in shown, f"$ {command}\n{shown}"
            assert "warning:" not in shown, f"$ {command}\n{shown}"
    (probe,) = (block for kind, block in BLOCKS if kind == "python")
    done = processes.run(["-c", probe], cwd=tmp_path, env=environment(), check=True)
    assert "mean average precision" in done.stdout
    for name, field, of in (("esc50_1", "category", ESC), ("us8k_1", "class", US8K)):
        for source, item in items_by_source(tmp_path / "shards" / name).items():
            kind = of[int(re.split("[-.]", source)[3 if of is ESC else 1])]
            assert json.loads(item["json"]).items() >= {field: kind, "caption": kind.replace("_", " ")}.items()
    clip = json.loads(items_by_source(tmp_path / "shards" / "fsd50k_test")["201.wav"]["json"])
    assert (clip["labels"], clip["caption"]) == (["Chink_and_clink", "Glass"], ["Chink and clink", "Glass"])
