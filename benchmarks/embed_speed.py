"""Command: files a second embedded and labelled by `clap-embed`'s code and by transformers, on the same files in turns.

    python -m benchmarks.embed_speed --output results/cpu/embed_speed/NAME.md

HTSAT-tiny + RoBERTa-base with random weights, exported for transformers; WAV files of 10 s at the model's rate, which
transformers gets as soundfile reads them. Timed from paths to vectors.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import soundfile
import torch

import clap_ds
from benchmarks.common import choose_device, in_turns, make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset
from clap_ds.config.places import version, work_folder
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import train_tokenizer
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval
from clap_ds.weights.export import export
from clap_ds.weights.formats import Checkpoint

import transformers  # isort: skip  (after torchaudio_compat)

LABELS, TEMPLATE = ["dog", "rain", "siren", "a door that is shut", "speech"], "This is a sound of {}."
COLUMNS = "way {name} | files/s {median:.2f} | interval {low:.2f}–{high:.2f} | times transformers' {ratio:.2f}"


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("embed_speed", __doc__)
    parser.add_argument("--files", type=whole_number(), default=64, help="a multiple of 32 fills clap-embed's batches")
    parser.add_argument("--rounds", type=whole_number(), default=5)
    options = parser.parse_args(argv)
    choose_device()
    shutil.rmtree(folder := work_folder() / "runs" / "embed_speed", ignore_errors=True)
    train_tokenizer(LABELS, folder / "tokenizer")
    model = ClapModel(load_preset("clap_htsat_tiny_roberta_base"))
    export(Checkpoint(model.config, model.state_dict()), source := folder / "model", str(folder / "tokenizer"))
    files, rng = [folder / f"{number:03d}.wav" for number in range(options.files)], np.random.default_rng(0)
    for number, path in enumerate(files):
        tone = np.sin(np.arange(480000) * 0.01 * (1 + number % 17)) * rng.random() * 0.5
        soundfile.write(path, tone + rng.standard_normal(480000) * 0.05 * rng.random(), 48000)
    theirs = transformers.ClapModel.from_pretrained(source).eval()
    extractor = transformers.ClapFeatureExtractor.from_pretrained(source)
    pipe: Any = transformers.pipeline("zero-shot-audio-classification", model=str(source), device="cpu")
    fp32, bf16 = (clap_ds.load(source, device="cpu", dtype=name) for name in ("float32", "bfloat16"))

    @torch.inference_mode()
    def features(batch: int) -> Any:
        found = []
        for first in range(0, len(files), batch):
            sounds = [soundfile.read(path, dtype="float32")[0] for path in files[first : first + batch]]
            inputs = extractor(sounds, sampling_rate=48000, return_tensors="pt")
            found.append(theirs.get_audio_features(**inputs).pooler_output)
        return torch.nn.functional.normalize(torch.cat(found), dim=-1).numpy()

    def labels() -> Any:
        sounds = [soundfile.read(path, dtype="float32")[0] for path in files]
        found = pipe(sounds, candidate_labels=LABELS, hypothesis_template=TEMPLATE, batch_size=16)
        return [sorted(each["score"] for each in one) for one in found]

    ways: dict[str, Callable[[], Any]] = {
        "transformers, batches of 1": lambda: features(1),
        "transformers, batches of 16": lambda: features(16),
        "clap-embed": lambda: [row.vector for row in fp32.iter_windows(files, windows="mean")],
        "clap-embed --precision bf16": lambda: bf16.embed_audio(files),
        "transformers' zero-shot pipeline": labels,
        "clap-label": lambda: np.sort(fp32.classify(files, LABELS, [TEMPLATE])),
    }
    first, *others, by_pipeline, by_label = (np.asarray(way()) for way in ways.values())
    cosine = min(float((each * first).sum(axis=1).min()) for each in others)
    assert cosine > 0.999, cosine
    assert np.abs(by_pipeline - by_label).max() < 1e-3

    def rate(way: Callable[[], Any]) -> float:
        begun_s = time.perf_counter()
        way()
        return len(files) / (time.perf_counter() - begun_s)

    rates = in_turns({name: partial(rate, way) for name, way in ways.items()}, options.rounds)
    rows = [{"name": name, **asdict(median_interval(each))} for name, each in rates.items()]
    best = [max(row["median"] for row in rows[:2])] * 4 + [rows[4]["median"]] * 2
    rows = [row | {"ratio": row["median"] / theirs} for row, theirs in zip(rows, best, strict=True)]
    made = f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    told = f"{len(files)} files, {options.rounds} rounds; {packages}; least cosine with the first way: {cosine:.6f}"
    figures = {"rows": rows, "cosine": cosine, "made": f"{made}; {packages}"}
    show(options.output, f"# Files of 10 s a second on {made}\n\n{table(COLUMNS, rows)}\n\n{told}", figures)


if __name__ == "__main__":
    run_alone(main)
