"""Test state dicts of other projects, and that malicious files are read without running code."""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank, window_function

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.key_mapping import laion_names, to_names
from tests.weights.test_formats import MICRO, assert_same, random_model


def saved_front_end(window: str = "hann", size: int = 1024, fmin: float = 50) -> dict[str, Tensor]:
    """Compute what LAION-CLAP saves of torchlibrosa, in float64 as there."""
    waves_NK = np.fft.rfft(np.diag(window_function(size, window)), axis=0)
    filters = mel_filter_bank(
        size // 2 + 1, 16, fmin, 14000, 48000, norm="slaney", mel_scale="slaney"
    )
    arrays = {
        "spectrogram_extractor.stft.conv_real.weight": waves_NK.real[:, None],
        "spectrogram_extractor.stft.conv_imag.weight": waves_NK.imag[:, None],
        "logmel_extractor.melW": filters,
    }
    return {
        f"audio_branch.{name}": torch.from_numpy(array).float() for name, array in arrays.items()
    }


def published(state: dict[str, Any]) -> dict[str, Any]:
    """Wrap a state as LAION's training saves it: with parallel names and numpy numbers."""
    optimizer = {
        "state": {0: {"step": np.float64(7)}},
        "param_groups": [{"lr": np.float32(1e-4), "betas": (0.9, 0.98)}],
    }
    wrapped = OrderedDict((f"module.{name}", tensor) for name, tensor in state.items())
    return {
        "epoch": np.int64(15),
        "name": "run",
        "optimizer": optimizer,
        "scaler": {},
        "state_dict": wrapped,
    }


def save_legacy(content: Any, path: Path) -> None:
    """Save like torch before 1.6 and numpy before 2."""
    torch.save(content, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"cnumpy._core.", b"cnumpy.core."))


@pytest.fixture
def laion() -> dict[str, Tensor]:
    """Return the state of `random_model` with LAION's names, and tensors that only LAION has.
    `test_names_shapes_and_dtypes_equal_open_clips` compares the names."""
    return {
        **to_names(random_model().state_dict(), laion_names),
        **saved_front_end(),
        "audio_branch.layers.0.blocks.1.attn_mask": torch.ones(4, 64, 64),
        "audio_transform.sequential.0.weight": torch.ones(32, 32),
        "text_branch.embeddings.position_ids": torch.ones(1, 66),
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("save", [torch.save, partial(torch.save, pickle_protocol=4), save_legacy])
def test_laions_files_load(tmp_path, laion, save):
    for content in (laion, published(laion)):
        save(content, tmp_path / "clap.pt")
        checkpoint = load_weights(tmp_path / "clap.pt")
        assert checkpoint.config == MICRO
        assert_same(checkpoint.build().state_dict(), random_model().state_dict())


def config_of(content: Any, tmp_path: Path) -> ClapConfig:
    """Save a file's content, load it and return the inferred sizes."""
    torch.save(content, tmp_path / "clap.pt")
    return load_weights(tmp_path / "clap.pt").config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # As HTSAT-tiny-win-1536.
        ({"size": 1536}, r"conv_real.*\(769, 1, 1536\).*\(513, 1, 1024\).*stft_window"),
        ({"window": "hamming"}, "conv_real"),
        ({"fmin": 0}, "melW"),
    ],
)
def test_different_front_end_is_rejected_except_of_an_audio_tower(tmp_path, laion, changes, reason):
    tensors = laion | saved_front_end(**changes)
    with pytest.raises(ValueError, match=rf"clap\.pt .*front end.*{reason}"):
        config_of(tensors, tmp_path)
    tower = {name: tensor for name, tensor in tensors.items() if name.startswith("audio_branch.")}
    torch.save(tower, tmp_path / "htsat.ckpt")
    assert load_weights(tmp_path / "htsat.ckpt", MICRO).is_audio_tower


def renamed(laion: dict[str, Tensor], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new, 1): tensor for name, tensor in laion.items()}


def without(laion: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in laion.items() if part not in name}


def test_dicts_prefixes_and_other_tensors_around_a_model_are_ignored(tmp_path, laion):
    optimizer = {"state": {0: {"step": torch.ones(1)}, 1: {"step": torch.ones(1)}}}
    for content in (
        renamed(laion, "", "_orig_mod."),
        {"n_averaged": torch.ones(()), **renamed(laion, "", "module.")},
        {"optimizer": optimizer, "args": {"lr": 1e-4}, "weights": renamed(laion, "", "module.")},
        {"checkpoint": {"model": renamed(laion, "", "a.b."), "optimizer": optimizer}},
        {"state_dict": {**renamed(laion, "", "model."), "criterion.weight": torch.ones(1)}},
        # Towers that were compiled one by one.
        {"module": renamed(laion, "_branch.", "_branch._orig_mod."), "loss": torch.zeros(())},
        without(laion, "logit_scale_t"),
        {name: tensor.bfloat16() for name, tensor in laion.items()},
    ):
        assert config_of(content, tmp_path) == MICRO


def test_file_of_two_models_is_rejected_with_their_prefixes(tmp_path, laion):
    both = renamed(laion, "", "model.") | renamed(laion, "", "ema.")
    with pytest.raises(ValueError, match=r"2 models.*model\., ema\."):
        config_of(both, tmp_path)


PANN = {
    "audio_branch.bn0.weight": torch.ones(64),
    "audio_branch.conv_block1.conv1.weight": torch.ones(64, 1, 3, 3),
}
BERT = {"text_branch.embeddings.word_embeddings.weight": torch.ones(30522, 1)}


def test_unsupported_models_and_contents_are_named(tmp_path, laion):
    norm = "layers.0.blocks.0.norm1"
    for content, reason in (
        ({"state_dict": PANN}, "PANN"),
        (laion | BERT, "BERT"),
        ({"audio_model.audio_encoder.norm.weight": torch.ones(1)}, "ClapModel.*folder"),
        ({"first": laion, "second": laion, "epoch": 3}, "first, second, epoch"),
        ([laion], "list"),
        (without(laion, norm), r"fit micro\. missing: \S*norm1"),
    ):
        with pytest.raises(ValueError, match=rf"clap\.pt: .*{reason}"):
            config_of(content, tmp_path)


@pytest.mark.parametrize(
    "name",
    # E5-base has XLM-RoBERTa's shapes, but a prefix that tensors don't state.
    ["clap_htsat_tiny_roberta_base_fused", "music", "htsat_tiny_xlm_roberta_base"],
)
def test_sizes_are_inferred_from_the_tensors(tmp_path, name):
    if name != "music":
        config = load_preset(name)
    else:
        # music_audioset_epoch_15_esc_90.14.pt and its like: HTSAT-base with heads of 512.
        tiny = load_preset("clap_htsat_tiny_roberta_base")
        base = load_preset("htsat_base_roberta_base")
        audio = base.audio.model_copy(update={"projection": tiny.audio.projection})
        changes = {"name": "laion_htsat_base_roberta_base", "audio": audio}
        config = tiny.model_copy(update=changes)
    with torch.device("meta"):
        tensors = to_names(ClapModel(config).state_dict(), laion_names)
    # Zeros take no space in a file.
    state = {
        key: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for key, tensor in tensors.items()
    }
    torch.save(published(state), tmp_path / "clap.pt", pickle_protocol=4)
    checkpoint = load_weights(tmp_path / "clap.pt")
    assert (checkpoint.config, checkpoint.tokenizer) == (config, config.text.hub_name)


class Reduced:
    """Pickle as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """Support pickled calls of a call's result."""


@pytest.mark.parametrize(("protocol", "as_zip"), [(2, False), (4, True)])
def test_no_code_in_a_file_is_run(tmp_path, protocol, as_zip):
    marker = tmp_path / "marker"
    inner = tmp_path / "inner.pt"
    make = f"open({str(marker)!r}, 'w')"
    torch.save(Reduced(eval, make), inner)
    opened = Reduced(open, str(marker), "w")
    rebuild = torch._utils._rebuild_tensor_v2
    for name, content in (
        ("exec", {"state_dict": {"module.a": [Reduced(exec, make)]}}),
        ("getattr", Reduced(Reduced(getattr, marker, "touch"))),
        ("torch.serialization.load", Reduced(torch.load, str(inner), None, None)),
        ("open", Reduced(rebuild, opened, 0, (1,), (1,), False, OrderedDict())),
    ):
        torch.save(
            content,
            tmp_path / "clap.pt",
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=as_zip,
        )
        with pytest.raises(ValueError, match=rf"it refers to \S*{name}"):
            load_weights(tmp_path / "clap.pt", MICRO)
        assert not marker.exists()


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_torchscript_archive_is_rejected_even_if_it_replaces_the_file(
    tmp_path, monkeypatch, is_replaced
):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "code.pt")
    load = torch.load

    def load_after_replacement(path: Any, **options: Any) -> Any:
        if options["weights_only"]:
            raise pickle.UnpicklingError("it was another file then")
        return load(path, **options)

    if is_replaced:
        monkeypatch.setattr(torch, "load", load_after_replacement)
    with pytest.raises(ValueError, match=r"code\.pt: can't be read.*TorchScript"):
        load_weights(tmp_path / "code.pt", MICRO)


def test_attributes_of_a_dict_are_ignored(tmp_path, laion):
    content = OrderedDict(laion)
    content.get = torch.ones(1)  # type: ignore[method-assign]
    assert config_of(content, tmp_path) == MICRO
