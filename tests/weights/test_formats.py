"""Test exact round trips of checkpoint formats, loading in transformers, and clear errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import clap_ds
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.model import ClapConfig, load_preset, parse_sizes
from clap_ds.config.transformers_config import convert_clap_config
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import load_transformers, save_transformers
from clap_ds.weights.hub import train_tokenizer
from tests.model.reference_clap import MICRO_AUDIO, MICRO_TEXT, randomise
from tests.weights.fake_checkpoints import save_safetensors

import transformers  # isort: skip

MICRO = load_preset("micro")


def random_model(config: ClapConfig = MICRO) -> ClapModel:
    model = ClapModel(config).eval()
    randomise(model.state_dict(), 0)
    model.logit_scale_text.copy_(model.logit_scale.detach())
    model.audio.batch_norm.num_batches_tracked.fill_(17)
    return model


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert the same names and bits."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


FRONT_END: dict[str, Any] = {
    "feature_size": 16,
    "max_length_s": 1,
    "frequency_min": 50,
    "truncation": "rand_trunc",
}


def save_clap(folder: Path, *, fusion: bool = False) -> transformers.ClapModel:
    """Save a micro `ClapModel`, without a front end."""
    audio = {**MICRO_AUDIO, "enable_fusion": fusion, "fusion_type": "aff_2d" if fusion else None}
    model = transformers.ClapModel(
        transformers.ClapConfig(audio_config=audio, text_config=MICRO_TEXT, projection_dim=32)
    )
    randomise(model.state_dict(), 6)
    model.eval().save_pretrained(folder)
    return model


def save_front_end(folder: Path, **fields: Any) -> None:
    transformers.ClapFeatureExtractor(**{**FRONT_END, **fields}).save_pretrained(folder)


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """Save a micro `transformers.ClapModel` with its front end."""
    save_clap(tmp_path / "hf")
    save_front_end(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("fusion", [False, True])
def test_transformers_round_trip_is_exact(tmp_path, fusion):
    original = save_clap(tmp_path / "hf", fusion=fusion)
    truncation = "fusion" if fusion else "rand_trunc"
    save_front_end(tmp_path / "hf", truncation=truncation)
    model = load_transformers(tmp_path / "hf").build()
    assert model.config.audio.fusion == fusion
    assert model.config.text.layer_norm_eps == 1e-12
    save_transformers(model, tmp_path / "back")
    back = transformers.ClapModel.from_pretrained(tmp_path / "back")
    # Of the two logit scales, training uses the first.
    logit_scale = original.logit_scale_a.detach()
    assert_same(back.state_dict(), {**original.state_dict(), "logit_scale_t": logit_scale})
    extractor = transformers.ClapFeatureExtractor.from_pretrained(tmp_path / "back")
    assert (extractor.truncation == "fusion") == fusion


def test_weights_in_parts_are_read(hf_folder):
    expected = load_transformers(hf_folder).build().state_dict()
    model = transformers.ClapModel.from_pretrained(hf_folder)
    model.save_pretrained(hf_folder, max_shard_size="50KB")
    (hf_folder / "model.safetensors").unlink()
    assert len(list(hf_folder.glob("model-*.safetensors"))) > 1
    assert_same(load_transformers(hf_folder).build().state_dict(), expected)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a dog barks"] * 20, folder, vocab_size=300)
    return transformers.AutoTokenizer.from_pretrained(folder)


SLOW = FRONT_END | {
    "sampling_rate": 16000,
    "hop_length": 160,
    "fft_window_size": 512,
    "frequency_max": 8000.0,
}


@pytest.mark.parametrize(
    "front_end",
    [
        SLOW,
        FRONT_END | {"truncation": "fusion"},
    ],
)
def test_front_end_saved_by_transformers_gives_its_embeddings(front_end, tokenizer, tmp_path):
    extractor = transformers.ClapFeatureExtractor(**front_end)
    sample_rate = extractor.sampling_rate
    torch.manual_seed(3)
    sound = (torch.randn(sample_rate * 2 // 3) / 10).numpy()
    inputs = extractor(sound, sampling_rate=sample_rate, return_tensors="pt")
    inputs["is_longer"] = torch.tensor([[False]])
    # transformers 5 saves both in processor_config.json, version 4 saved the second file.
    for saved in (transformers.ClapProcessor(extractor, tokenizer), extractor):
        folder = tmp_path / type(saved).__name__
        model = save_clap(folder, fusion=front_end["truncation"] == "fusion")
        saved.save_pretrained(folder)
        assert load_preset(str(folder)) == load_weights(folder).config
        with torch.no_grad():
            expected = model(**inputs, input_ids=torch.tensor([[0, 2]])).audio_embeds[0]
        (vector,) = clap_ds.load(folder, device="cpu").embed_audio(sound, sample_rate)
        assert float(torch.from_numpy(vector) @ expected) > 0.999999


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("feature_extractor_type", "WhisperFeatureExtractor"),
        ("feature_size", 64),
        ("nb_max_samples", 480_000),
        ("padding", "pad"),
        ("top_db", 80),
        ("truncation", "fusion"),
    ],
)
def test_front_end_that_the_model_cant_have_is_rejected(field, value, hf_folder):
    (path,) = hf_folder.glob("preprocessor_config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ValueError, match=f"{path}: {field} is"):
        load_preset(str(hf_folder))


def test_missing_front_end_is_assumed_and_printed_by_the_first_rank(tmp_path, capfd, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clap"}))
    capfd.readouterr()
    assert load_preset(str(tmp_path)).audio == load_preset("clap_htsat_tiny_roberta_base").audio
    assert "assuming LAION-CLAP's front end: 48 kHz" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "1")
    load_preset(str(tmp_path))
    assert not capfd.readouterr().err


KEY = "audio_model.audio_encoder.layers.0.blocks.1.attention.self.key.weight"
WRONG_SIZES: list[tuple[str, dict[str, Any], str]] = [
    ("audio_config", {"patch_size": [4, 2]}, "patch_stride is"),
    ("text_config", {"pad_token_id": 0}, "text_config.pad_token_id is 0"),
]


def test_unfit_sizes_and_tensors_are_rejected_and_listed(hf_folder):
    weights = hf_folder / "model.safetensors"
    state = load_file(weights)
    del state[KEY]
    state |= {"surplus.weight": torch.zeros(2), "audio_projection.linear2.bias": torch.zeros(31)}
    save_file(state, weights)
    reshaped = r"audio_projection\.linear2\.bias \(31,\) instead of \(32,\)"
    message = rf"missing: {KEY}\. unexpected: surplus\.weight\. .*{reshaped}"
    with pytest.raises(ValueError, match=message):
        load_transformers(hf_folder)
    weights.rename(hf_folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights are not read"):
        load_transformers(hf_folder)
    fields = json.loads((hf_folder / "config.json").read_text())
    for section, changes, reason in WRONG_SIZES:
        changed = {**fields, section: {**fields[section], **changes}}
        (hf_folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=reason):
            load_transformers(hf_folder)


def test_own_safetensors_store_any_model_completely(tmp_path):
    mean = MICRO.model_copy(
        update={"name": "other", "text": MICRO.text.model_copy(update={"pooling": "mean"})}
    )
    for config in (mean, MICRO):
        model = random_model(config)
        save_safetensors(model, tmp_path / "clap.safetensors")
        checkpoint = load_weights(tmp_path / "clap.safetensors")
        assert checkpoint.config == config
        assert_same(checkpoint.build().state_dict(), model.state_dict())
    with pytest.raises(ValueError, match=r"doesn't fit other\. unexpected: text\.roberta\.pooler"):
        checkpoint.load_into(ClapModel(mean))


@pytest.mark.parametrize(
    ("changes", "preset"),
    [
        # transformers' defaults are LAION's tiny model.
        ({}, "clap_htsat_tiny_roberta_base"),
        # larger_clap checkpoints are HTSAT-base with a joint space of 512.
        (
            {"patch_embeds_hidden_size": 128, "depths": [2, 2, 12, 2], "hidden_size": 1024},
            "htsat_base_roberta_base",
        ),
    ],
)
def test_published_layouts_equal_presets(changes, preset):
    whole = transformers.ClapConfig(audio_config=changes).to_dict()
    sizes = parse_sizes(convert_clap_config(whole), "hf")
    # Missing fields have transformers' defaults.
    sparse = {"model_type": "clap", "audio_config": changes}
    assert parse_sizes(convert_clap_config(sparse), "hf") == sizes
    expected = load_preset(preset).audio
    assert sizes.audio == expected.model_copy(update={"projection": sizes.audio.projection})
    assert sizes.audio.projection.hidden_dim == sizes.joint_dim == 512
