"""Run docs/training.md's commands, from a folder of sounds and a CSV to retrieval metrics and an
exported model."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests import processes
from tests.conftest import micro_run
from tests.training import training_commands as commands

pytestmark = pytest.mark.end_to_end
HEADING = "## From a folder of sounds to a model that others load"
KINDS = ("hum", "whistle", "click")
MODULES: dict[str, list[str]] = {"python": [], "clap-ds": ["-m", "clap_ds"]}
"""Commands that tests fork; others are for DeepSpeed's launcher."""


def write_sounds(folder: Path) -> None:
    """Write 48 WAVs of tones, longer than the model's clips, and a CSV with two caption columns and
    one of classes."""
    (folder / "sounds").mkdir()
    rows = ["path,caption_1,caption_2,kind"]
    for number in range(48):
        kind = KINDS[number % 3]
        frequency = 100 * (1 + number % 3) ** 3 * (1 + number / 500)
        wave = 0.5 * np.sin(2 * np.pi * frequency * np.arange(20000) / 16000)
        soundfile.write(folder / "sounds" / f"{number}.wav", wave, 16000)
        rows.append(f"sounds/{number}.wav,a {kind},{kind} number {number},{kind}")
    (folder / "clips.csv").write_text("\n".join(rows))


def in_docs(language: str) -> str:
    """Return the first code block of a language below a heading."""
    text = (commands.ROOT / "docs" / "training.md").read_text(encoding="utf-8").split(HEADING)[1]
    return text.split(f"```{language}\n")[1].split("```")[0]


def run(folder: Path, command: list[str], *options: str) -> str:
    """Run a command as the docs have it, with the path of the only folder of checkpoints."""
    program, *arguments = command
    arguments = [
        str(*folder.glob(argument)) if argument.endswith("-checkpoints") else argument
        for argument in arguments
    ]
    env = commands.environment()
    if program in MODULES:
        forked = [*MODULES[program], *arguments, *options]
        return processes.run(forked, cwd=folder, env=env, check=True).stdout
    launched = [*commands.deepspeed_launcher(), *arguments, *options]
    result = subprocess.run(
        launched, cwd=folder, capture_output=True, text=True, timeout=commands.TIMEOUT_S, env=env
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_docs_lead_from_sounds_to_exported_model(tmp_path):
    (tmp_path / "clap_ds").symlink_to(commands.ROOT / "clap_ds")
    write_sounds(tmp_path)
    build, train, evaluate, export = (
        shlex.split(line.removeprefix("$ "))
        for line in in_docs("console").splitlines()
        if line.startswith("$ ")
    )
    output = run(tmp_path, build, "--train_tokenizer", "300", "--held_out", "0.25", "--shards", "2")
    # The section to paste into the run's JSON.
    section = re.search(r'^"data": (\{.*?^\})', output, re.MULTILINE | re.DOTALL)
    assert section is not None
    data = json.loads(section[1]) | {"num_workers": 0, "shuffle_buffer": 8}
    held_out = "shards/held_out-*.tar"
    evaluation = {task: {"shards": held_out} for task in ("retrieval", "zero_shot")}
    clap = {"data": data, "train": {"max_samples": 2 * 4 * 6}, "evaluation": evaluation}
    (tmp_path / "my_run.json").write_text(json.dumps(micro_run(bf16={"enabled": False}, clap=clap)))
    run(tmp_path, train)

    run(tmp_path, evaluate, "--zero_shot", held_out, "--json", "results.json")
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]
    (summary,) = (tmp_path / "runs").glob("my_run-*/summary.json")
    in_training = json.loads(summary.read_text())["evaluation"]
    # One rank here, two there.
    for name, value in metrics.items():
        assert value == pytest.approx(in_training[name], abs=1e-9)

    run(tmp_path, export)
    output = run(tmp_path, ["python", "-c", in_docs("python")])
    assert re.search(r"tensor\(\[\[0\.\d+, 0\.\d+\]\]\)", output)
