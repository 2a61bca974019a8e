"""A text tower of another architecture is trained, resumed without the file of its sizes, evaluated, and refused by export."""

import json
from pathlib import Path

import pytest
import tokenizers

from clap_ds.config.model import load_preset
from tests import processes
from tests.training import training_commands as commands

import transformers  # isort: skip

pytestmark = pytest.mark.end_to_end
MICRO = load_preset("micro")


def bert_tokenizer(folder: Path) -> str:
    """Letters as BERT frames them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = dict.fromkeys("abcdefghijklmnopqrstuvwxyz ")
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    words.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("--clips", "24", "--shards", "2", "--seconds", "1-2")
    return commands.make_sounds(tmp_path_factory.mktemp("sounds") / "data", *options)


@pytest.mark.parametrize(("architecture", "text"), [("bert", "packed"), ("mpnet", "padded")])
def test_trained_resumed_and_evaluated(tmp_path: Path, sounds: Path, architecture: str, text: str) -> None:
    sizes = MICRO.model_copy(update={"text": MICRO.text.model_copy(update={"architecture": architecture})})
    own, data = tmp_path / "own.json", commands.shard_data(sounds)
    own.write_text(json.dumps(sizes.model_dump(mode="json", exclude={"name"})))
    wrong = data["tokenizer"]
    if architecture == "bert":
        data["tokenizer"] = bert_tokenizer(tmp_path / "tokenizer")
    clap = {"model": {"preset": str(own)}, "text": text, "data": data, "train": {"samples": 8}}
    clap |= {"checkpoint": {"folder": str(tmp_path / "saved")}, "text_tokens": 24}
    config = commands.write_training(tmp_path, bf16={"enabled": True}, clap=clap)
    commands.train(config, 1)
    own.unlink()
    (first,) = commands.run_directories(config)
    resolved = json.loads((first / "config.json").read_text())
    assert resolved["clap"]["model"]["preset"]["text"]["architecture"] == architecture
    resolved["clap"]["train"]["samples"] = 16
    (tmp_path / "again.json").write_text(json.dumps(resolved))
    commands.train(tmp_path / "again.json", 1)
    assert [row["step"] for row in commands.lines(tmp_path / "again.json")] == [3, 4]
    options = ["saved", "--retrieval", *sorted(map(str, sounds.glob("*.tar"))), "--json", "found.json"]
    evaluate = ["-m", "clap_ds.evaluate", *options]
    processes.run(evaluate, cwd=tmp_path, env=commands.environment(), check=True)
    assert json.loads((tmp_path / "found.json").read_text())["model"] == "own"
    export = ["-m", "clap_ds.weights.export", "saved", "hf"]
    refused = processes.run(export, cwd=tmp_path, env=commands.environment())
    assert refused.returncode == 2
    assert f"own can't be a transformers.ClapModel: its text tower is a {architecture}" in refused.stderr
    assert not (tmp_path / "hf").exists()
    if architecture == "bert":
        refused = processes.run([*evaluate, "--tokenizer", wrong], cwd=tmp_path, env=commands.environment())
        assert refused.returncode == 2
        assert (
            "pads with id 1, as RoBERTa's and MPNet's do; expected the text tower's, 0, as BERT's do" in refused.stderr
        )
