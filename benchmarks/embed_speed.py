"""Command: files a second embedded by `clap-embed`'s code and by transformers, and labelled, on the same files in turns.

    python -m benchmarks.embed_speed --output results/cpu/embed_speed/NAME.md

HTSAT-tiny + RoBERTa-base with random weights, exported for transformers; WAV files of 10 s at the model's rate, which
transformers is given as soundfile reads them. Each way embeds all files, from paths to vectors; `clap-embed` to a table.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import soundfile
import torch

import clap_ds
from benchmarks.common import in_turns, make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset
from clap_ds.config.places import VERSION, version, work_folder
from clap_ds.inference.parts import Parts
from clap_ds.inference.vectors import About
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import train_tokenizer
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval
from clap_ds.weights.export import export
from clap_ds.weights.formats import Checkpoint

import transformers  # isort: skip  (after torchaudio_compat)

LABELS = ["dog", "rain", "siren", "a door that is shut", "speech"]
TEMPLATE = "This is a sound of {}."
COLUMNS = "way {name} | files/s {median:.2f} | interval {low:.2f}–{high:.2f} | times transformers' {ratio:.2f}"


def make(folder: Path, num_files: int) -> tuple[Path, list[Path]]:
    """A transformers folder with random weights, and sounds."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    train_tokenizer(LABELS, folder / "tokenizer")
    model = ClapModel(load_preset("htsat_tiny_roberta_base"))
    export(Checkpoint(model.config, model.state_dict()), folder / "model", str(folder / "tokenizer"))
    files, rng = [folder / f"{number:03d}.wav" for number in range(num_files)], np.random.default_rng(0)
    for number, path in enumerate(files):
        tone = np.sin(np.arange(480000) * 0.01 * (1 + number % 17)) * rng.random() * 0.5
        soundfile.write(path, tone + rng.standard_normal(480000) * 0.05 * rng.random(), 48000)
    return folder / "model", files


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("embed_speed", __doc__)
    parser.add_argument("--files", type=whole_number(), default=64)
    parser.add_argument("--rounds", type=whole_number(), default=5)
    parser.add_argument("--threads", type=whole_number(), default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    folder = work_folder() / "runs" / "embed_speed"
    source, files = make(folder, options.files)
    theirs = transformers.ClapModel.from_pretrained(source).eval()
    extractor = transformers.ClapFeatureExtractor.from_pretrained(source)
    pipe: Any = transformers.pipeline("zero-shot-audio-classification", model=str(source), device="cpu")
    ours = {name: clap_ds.load(source, device="cpu", dtype=name) for name in ("float32", "bfloat16")}

    def read(paths: list[Path]) -> list[Any]:
        return [soundfile.read(path, dtype="float32")[0] for path in paths]

    @torch.inference_mode()
    def by_transformers(batch: int) -> Any:
        found = []
        for first in range(0, len(files), batch):
            inputs = extractor(read(files[first : first + batch]), sampling_rate=48000, return_tensors="pt")
            found.append(theirs.get_audio_features(**inputs).pooler_output)
        return torch.nn.functional.normalize(torch.cat(found), dim=-1).numpy()

    def by_command() -> Any:
        clap, output = ours["float32"], folder / "vectors.npz"
        output.unlink(missing_ok=True)
        parts = Parts(output, About(clap.source, clap.fingerprint, clap.dim, "mean", 0, "fp32", None, None, VERSION))
        marks, _ = parts.begin({str(path): path for path in files}) or ({}, {})
        for _ in parts.write(clap.iter_windows(files, windows="mean", num_workers=1), marks):
            pass
        parts.join(marks)
        return np.load(output)["vector"]

    def by_pipeline() -> Any:
        found: Any = pipe(read(files), candidate_labels=LABELS, hypothesis_template=TEMPLATE, batch_size=16)
        return [
            [scores[label] for label in LABELS] for each in found for scores in [{o["label"]: o["score"] for o in each}]
        ]

    ways: dict[str, Callable[[], Any]] = {
        "transformers, batches of 1": lambda: by_transformers(1),
        "transformers, batches of 16": lambda: by_transformers(16),
        "clap-embed --num_workers 1": by_command,
        "the same in bf16": lambda: ours["bfloat16"].embed_audio(files, num_workers=1),
        "transformers' zero-shot pipeline": by_pipeline,
        "Clap.classify": lambda: ours["float32"].classify(files, LABELS, [TEMPLATE], num_workers=1),
    }
    found = {name: np.asarray(way()) for name, way in ways.items()}
    first, second, *vectors, theirs_of_labels, ours_of_labels = found.values()
    cosine = min(float((each * first).sum(axis=1).min()) for each in (second, *vectors))
    assert cosine > 0.999, cosine
    assert np.abs(theirs_of_labels - ours_of_labels).max() < 1e-3

    def rate(way: Callable[[], Any]) -> float:
        begun_s = time.perf_counter()
        way()
        return len(files) / (time.perf_counter() - begun_s)

    rates = in_turns({name: partial(rate, way) for name, way in ways.items()}, options.rounds)
    rows = [{"name": name, **cast("dict[str, Any]", median_interval(each))} for name, each in rates.items()]
    for number, row in enumerate(rows):
        row["ratio"] = row["median"] / (rows[4]["median"] if number > 3 else max(row["median"] for row in rows[:2]))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    title = (
        f"# Files of 10 s on {device_name(torch.device('cpu'))}, {options.threads} threads, {date.today()}; {packages}"
    )
    agree = f"{len(files)} files, {options.rounds} rounds in turns; vectors' smallest cosine with transformers': {cosine:.6f}"
    show(options.output, f"{title}\n\n{table(COLUMNS, rows)}\n\n{agree}", {"rates": rows, "cosine": cosine})


if __name__ == "__main__":
    run_alone(main)
