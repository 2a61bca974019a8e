"""What is different between a checkpoint and the run that resumes from it, or starts from its weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from clap_ds.config.model import load_preset
from clap_ds.config.settings import RunSettings
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import train_tokenizer
from clap_ds.ranks.distributed import Ranks
from clap_ds.training.changes import compare, tokenizer_problem
from clap_ds.training.start import Choices, TrainingStart
from clap_ds.weights.checkpoint_files import Manifest
from tests.training.reference_steps import CPU, run_settings
from tests.weights.fake_checkpoints import checkpoint_of

MICRO = load_preset("micro")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two that divide words differently."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, words in (("one", "a dog barks"), ("other", "rain on a roof")):
        train_tokenizer([words] * 3, folder / name, vocab_size=280)
    return folder / "one", folder / "other"


@pytest.fixture(scope="module")
def checkpoint(tokenizers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(ClapModel(MICRO), tmp_path_factory.mktemp("saved"), tokenizer=tokenizers[0])


def _run(tokenizer: Path, initial_weights: Path | None = None) -> RunSettings:
    data = {"source": "shards", "shards": "a.tar", "tokenizer": str(tokenizer)}
    train = {"initial_weights": None if initial_weights is None else str(initial_weights)}
    return run_settings(clap={"data": data, "train": train})


def test_tokenizers_are_compared_by_what_they_do(tokenizers: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = map(str, tokenizers)
    train_tokenizer(["a dog barks"] * 3, tmp_path / "copy", vocab_size=280)
    assert tokenizer_problem(one, str(tmp_path / "copy"), vocab_size=512) is None
    assert tokenizer_problem(None, other, vocab_size=512) is tokenizer_problem(one, None, vocab_size=512) is None
    assert f"{other} gives captions other token ids than {one}" in str(tokenizer_problem(one, other, vocab_size=512))
    unknown = str(tokenizer_problem("no/such-tokenizer", one, vocab_size=512))
    assert "can't be compared: " in unknown
    assert "no/such-tokenizer" in unknown


def test_another_tokenizer_than_the_checkpoints_must_be_accepted(
    checkpoint: Path, tokenizers: tuple[Path, Path]
) -> None:
    manifest = replace(Manifest.read(checkpoint), model=MICRO.model_dump(mode="json"))
    assert compare(checkpoint, manifest, MICRO, {}, _run(tokenizers[0])).to_accept == []
    (change,) = compare(checkpoint, manifest, MICRO, {}, _run(tokenizers[1])).to_accept
    assert change.startswith(f"the tokenizer: {tokenizers[1]} gives captions other token ids")
    deeper = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fmax": 9000})})
    (change,) = compare(checkpoint, manifest, deeper, {}, None).to_accept
    assert "audio.fmax is " in change


def test_weights_start_with_the_tokenizer_they_were_trained_with(
    checkpoint: Path, tokenizers: tuple[Path, Path]
) -> None:
    alone = Ranks(0, 1, 0, 1)
    for tokenizer, choices in ((tokenizers[0], Choices()), (tokenizers[1], Choices(accept_changes=True))):
        run = _run(tokenizer, checkpoint)
        assert TrainingStart(run, alone, choices).build_model(run, CPU).config == run.clap.preset()
    run = _run(tokenizers[1], checkpoint)
    with pytest.raises(ValueError, match=r"clap.train.initial_weights: .* other token ids .* by --accept_changes"):
        TrainingStart(run, alone).build_model(run, CPU)
