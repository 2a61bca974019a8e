"""Test models of open_clip, with a stand-in: sizes, batches, training, resuming and evaluation.

`results/open_clip/training_1.md` compares losses with open_clip's own loop."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config.model import load_preset
from clap_ds.config.open_clip_config import REQUIREMENT, VERSION
from clap_ds.config.schema import ModelSettings
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import build_model
from clap_ds.model.clap import new_model
from clap_ds.throughput_bench.flops_profile import measure_flops
from clap_ds.utils.errors import UserError
from clap_ds.weights.hub import load_tokenizer, tokenize
from tests.model import fake_open_clip
from tests.training.reference_steps import CPU, engine_of, micro_batches, settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def open_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_open_clip.install(tmp_path / "site", monkeypatch)


@pytest.mark.parametrize("name", fake_open_clip.CONFIGS)
def test_model_embeds_batches_and_loads_checkpoints_of_open_clip(name, tmp_path):
    config = load_preset(f"open_clip:{name}")
    assert (config.audio.clip_shape, config.text.max_tokens) == ((16000,), 16)
    model = new_model(config, learns_bias=True, activation_checkpointing=["audio"], drop_path=0.1)
    assert model.audio.is_checkpointed
    unused = {"audio.filters", "audio.unused.weight", "audio.unused.bias"}
    if name == "fake-naflex":
        unused |= {"audio.norm.weight", "audio.norm.bias"}
    parameters = model.named_parameters()
    assert {key for key, parameter in parameters if not parameter.requires_grad} == unused
    waveforms = torch.randint(-9000, 9000, (3, 16000), dtype=torch.int16)
    tokenizer = load_tokenizer(config.text.hub_name, vocab_size=0)
    ids, mask = tokenize(["a dog", "rain on a roof", "hum"], tokenizer, 5)
    assert ids.tolist() == [[98, 1, 3, 99, 0], [98, 4, 2, 1, 4], [98, 3, 99, 0, 0]]
    audio, _, scale, bias = model(waveforms, ids, mask)
    torch.testing.assert_close(audio.norm(dim=1), torch.ones(3))
    assert (scale.item(), bias.item()) == (pytest.approx(10), -10)
    with pytest.raises(ValueError, match="takes waveforms"):
        model.encode_audio(torch.zeros(3, 101, 64))
    state = model.state_dict()
    checkpoint = {f"module.{key}": tensor.squeeze() for key, tensor in state.items()}
    torch.save({"epoch": 1, "state_dict": checkpoint}, tmp_path / "epoch_1.pt")
    loaded = new_model(config, learns_bias=True)
    load_weights(tmp_path / "epoch_1.pt", config).load_into(loaded)
    assert all(torch.equal(state[key], tensor) for key, tensor in loaded.state_dict().items())


def test_unknown_name_is_rejected():
    with pytest.raises(ValueError, match="did you mean 'fake-htsat'"):
        load_preset("open_clip:fake-htsta")


def test_unsupported_settings_are_rejected(write_run):
    path = write_run(clap={"model": {"preset": "open_clip:fake-htsat"}, "text_packing": True})
    message = r"(?s)takes padded captions.*trains in fp32 or with torch_autocast, not in bf16"
    with pytest.raises(UserError, match=message):
        load_run(path)
    # By default its captions of shards are padded, too.
    data = {"source": "webdataset", "shards": "a.tar", "tokenizer": "x"}
    path = write_run(clap={"model": {"preset": "open_clip:fake-htsat"}, "data": data})
    with pytest.raises(UserError, match="trains in fp32") as refusal:
        load_run(path)
    assert "padded captions" not in str(refusal.value)


def test_old_version_is_rejected_with_the_one_in_the_extra(tmp_path, monkeypatch):
    """No package index has the version, so it is installed by its address."""
    (tmp_path / "released" / "open_clip").mkdir(parents=True)
    (tmp_path / "released" / "open_clip" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "released"))
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    with pytest.raises(ValueError, match=rf"needs .*{VERSION} or later") as error:
        load_preset("open_clip:CLAP-HTSAT-tiny")
    assert f"pip install '{REQUIREMENT}'" in str(error.value)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["open-clip"] == [REQUIREMENT]


EVIL = """
import pathlib, transformers
pathlib.Path(__file__).with_name("ran").touch()
class Evil(transformers.PreTrainedTokenizerFast): ...
"""


def test_code_of_tokenizer_is_not_run_even_if_trusted(tmp_path, monkeypatch):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.replace("__file__", repr(str(folder / "evil.py"))))
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map})
    )
    load = "AutoTokenizer.from_pretrained(name[10:], trust_remote_code=True)"
    package = tmp_path / "site" / "open_clip" / "__init__.py"
    package.write_text(f"get_tokenizer = lambda name: __import__('transformers').{load}")
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    with pytest.raises(ValueError, match="code, which is never run"):
        load_tokenizer(f"open_clip:local-dir:{folder}", vocab_size=9)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("audio", [3, {"hop_size": 0}, {"model_type": "naflexvit", "mel_bins": -1}])
def test_impossible_sizes_are_rejected(tmp_path, audio):
    sizes = {"embed_dim": 8, "audio_cfg": audio, "text_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes}))
    with pytest.raises(ValueError, match="open_clip:local-dir"):
        load_preset(f"open_clip:local-dir:{tmp_path}")


def test_missing_open_clip_is_rejected_with_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ValueError, match=r"pip install 'clap-ds\[open-clip\]'"):
        load_tokenizer("open_clip:CLAP-HTSAT-tiny", vocab_size=9)


def _setup(site: str) -> tuple[RunSettings, ClapEngine]:
    sys.path.insert(0, site)
    run = settings(model={"preset": "open_clip:fake-htsat"})
    return run, engine_of(run, build_model(run.clap.model, run.clap.loss, CPU))


def _train_and_resume(site: str, folder: Path) -> None:
    run, engine = _setup(site)
    _, resumed = _setup(site)
    batches = micro_batches(run, 0, 1, 3)
    with Checkpointer(folder) as checkpoints:
        engine.step(iter(batches[:1]))
        (saved,) = checkpoints.save(engine, TrainState(1, 3))
        checkpoints.load(saved.path, resumed)
    losses = [float(engine.step(iter([batch]))) for batch in batches[1:]]
    assert losses == [float(resumed.step(iter([batch]))) for batch in batches[1:]]
    assert losses[0] != losses[1]


def test_model_trains_and_resumes(one_rank, tmp_path):
    one_rank.run(_train_and_resume, str(tmp_path / "site"), tmp_path / "checkpoints")


def _count_flops(site: str, folder: Path) -> dict[str, float]:
    run, engine = _setup(site)
    batches = iter(micro_batches(run, 0, 1, 1))
    return measure_flops(engine, batches, ModelSettings(), {}, folder)  # type: ignore[arg-type]


def test_flops_are_counted(one_rank, tmp_path):
    (flops,) = one_rank.run(_count_flops, str(tmp_path / "site"), tmp_path)
    assert flops["published_gflops"] is None
    assert flops["model_gflops"] == pytest.approx(2 * 16 * 8 / 1e9)
