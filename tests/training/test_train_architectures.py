"""A text tower of another architecture is trained, resumed without the file of its sizes, evaluated, and refused by export."""

import json
from pathlib import Path

import pytest

from clap_ds.config.model import load_preset
from tests import processes
from tests.training import training_commands as commands

import transformers  # isort: skip

pytestmark = pytest.mark.end_to_end
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop", *(f"##{letter}" for letter in "eiou")]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("--clips", "24", "--shards", "2", "--seconds", "1-2")
    return commands.make_sounds(tmp_path_factory.mktemp("sounds") / "data", *options)


@pytest.mark.parametrize(("architecture", "text"), [("bert", "packed"), ("mpnet", "padded")])
def test_trained_resumed_and_evaluated(tmp_path: Path, sounds: Path, architecture: str, text: str) -> None:
    sizes, data = load_preset("micro").model_dump(mode="json", exclude={"name"}), commands.shard_data(sounds)
    sizes["text"]["architecture"] = architecture
    (own := tmp_path / "own.json").write_text(json.dumps(sizes))
    wrong = data["tokenizer"]
    if architecture == "bert":
        data["tokenizer"] = str(tmp_path / "tokenizer")
        vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
        transformers.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path / "tokenizer")
    clap = {"model": {"preset": str(own)}, "text": text, "data": data, "train": {"samples": 8}}
    clap |= {"checkpoint": {"folder": str(tmp_path / "saved")}, "text_tokens": 24}
    commands.train(config := commands.write_training(tmp_path, bf16={"enabled": True}, clap=clap), 1)
    own.unlink()
    resolved = json.loads((commands.run_directories(config)[0] / "config.json").read_text())
    resolved["clap"]["train"]["samples"] = 16
    (again := tmp_path / "again.json").write_text(json.dumps(resolved))
    commands.train(again, 1)
    assert [row["step"] for row in commands.lines(again)] == [3, 4]

    def run(*command: str) -> tuple[int, str]:
        done = processes.run(["-m", *command], cwd=tmp_path, env=commands.environment())
        return done.returncode, done.stdout + done.stderr

    evaluate = ["clap_ds.evaluate", "saved", "--retrieval", str(sounds / "*.tar")]
    code, output = run(*evaluate)
    assert (code, "step 4: own on 1 × " in output) == (0, True), output
    code, output = run("clap_ds.weights.export", "saved", "hf")
    assert (code, (tmp_path / "hf").exists()) == (2, False)
    assert f"own can't be a transformers.ClapModel: its text tower is a {architecture}" in output
    if architecture == "bert":
        code, output = run(*evaluate, "--tokenizer", wrong)
        assert code == 2
        assert "pads with id 1, as RoBERTa's and MPNet's do; expected the text tower's, 0, as BERT's do" in output
