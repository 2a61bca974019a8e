"""Run the commands of docs/fine_tuning.md, with few clips and steps."""

import re
import shlex
import shutil

import pytest

from tests import processes
from tests.training import training_commands as commands

pytestmark = pytest.mark.end_to_end
PAGE = (commands.ROOT / "docs" / "fine_tuning.md").read_text(encoding="utf-8")
# Later options replace the page's.
FEWER = {
    "python": "--clips 60",
    "clap-ds train": (
        "--set clap.train.max_samples=64 --set scheduler.params.total_num_steps=4"
        " --set scheduler.params.warmup_num_steps=1 --set train_micro_batch_size_per_gpu=16"
    ),
}
WEIGHTS = (
    "train --config train_demo_cpu --set clap.train.max_samples=32 --set"
    " train_micro_batch_size_per_gpu=16 --set scheduler.params.total_num_steps=2 --set"
    " scheduler.params.warmup_num_steps=1 --set clap.evaluation.zero_shot=null --set"
    " clap.evaluation.retrieval=null --set clap.evaluation.every_steps=null"
)


def test_commands_lead_from_made_sounds_to_scores_and_a_probe(tmp_path, monkeypatch):
    shutil.copytree(commands.ROOT / "examples", tmp_path / "examples")
    data = tmp_path / "runs" / "train_demo_data" / "train"
    commands.make_sounds(data, "--clips", "48", "--shards", "1", "--seconds", "1")
    env = commands.environment(PYTHONPATH=str(commands.ROOT))

    def run(words: list[str]) -> str:
        return processes.run(words, cwd=tmp_path, env=env, check=True).stdout

    run(["-m", "clap_ds", *WEIGHTS.split()])
    walk, _, probe_section = PAGE.partition("## A linear probe")
    probe_section = probe_section.partition("## With LAION")[0]
    outputs = []
    text = (walk + probe_section).replace("\\\n", "")
    for line in re.findall(r"^\$ ((?:python|clap-ds) .*)", text, re.MULTILINE):
        # The shell's part: variables of commands, and the folders of checkpoints.
        line = re.sub(r'"\$\(echo (.*?)\)"', r"\1", line)
        for pattern in re.findall(r"runs/\S*-checkpoints", line):
            (folder,) = tmp_path.glob(pattern)
            line = line.replace(pattern, str(folder))
        program, command, *_ = line.split()
        key = program if program == "python" else f"{program} {command}"
        words = [*shlex.split(line)[1:], *FEWER.get(key, "").split()]
        outputs.append(run(words if program == "python" else ["-m", "clap_ds", *words]))
    made, built, before, trained, after, embedded = outputs
    assert "60 clips" in made
    assert "held_out: 12 items" in built
    for scores in (before, after):
        assert "zero_shot_top1" in scores
        assert "retrieval_text_to_audio_r1" in scores
    assert "done: 64 samples in 4 steps" in trained
    assert "60 rows from 60 files" in embedded
    (script,) = re.findall(r"```python\n(.*?)```", probe_section, re.DOTALL)
    assert re.search(r"\d+\.\d% ± \d+\.\d% over 5 folds", run(["-c", script]))
