"""Test state dicts of other projects, and that malicious files are read without running code."""

import os
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
from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import renamed_checkpoint
from clap_ds.weights.key_mapping import laion_names, to_names, transformers_names
from tests.model.reference_clap import REFERENCES, randomise
from tests.weights.test_formats import MICRO, assert_same, without_classifier

TO_LAION = """audio_model.audio_encoder audio_branch, attention.self attn, attention.output.dense attn.proj,
intermediate.dense mlp.fc1, output.dense mlp.fc2, layernorm_before norm1, layernorm_after norm2, batch_norm bn0"""


def saved_front_end(
    window: str = "hann", size: int = 1024, rate: int = 48000, fmin: float = 50
) -> dict[str, Tensor]:
    """Compute what LAION-CLAP saves of torchlibrosa, in float64 as there."""
    waves_NK = np.fft.rfft(np.diag(window_function(size, window)), axis=0)
    filters = mel_filter_bank(
        size // 2 + 1, 16, fmin, 14000, rate, norm="slaney", mel_scale="slaney"
    )
    parts = {
        "spectrogram_extractor.stft.conv_real.weight": waves_NK.real[:, None],
        "logmel_extractor.melW": filters,
    }
    parts |= {"spectrogram_extractor.stft.conv_imag.weight": waves_NK.imag[:, None]}
    return {
        f"audio_branch.{name}": torch.from_numpy(value).float() for name, value in parts.items()
    }


def laion_state(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Build a LAION-CLAP state dict from a transformers one, renamed by hand, with LAION's
    additional parts."""
    named: dict[str, Tensor] = {}
    for name, tensor in source.items():
        if name.startswith("audio_model"):
            if ".self.key." in name or ".self.value." in name:
                continue
            if ".self.query." in name:
                tensor = torch.cat(
                    [source[name.replace("query", part)] for part in ("query", "key", "value")]
                )
                name = name.replace("self.query", "self.qkv")
            for pair in TO_LAION.split(","):
                name = name.replace(*pair.split())
        named[
            name.replace("text_model", "text_branch")
            .replace("linear1", "0")
            .replace("linear2", "2")
        ] = tensor
    shapes = {
        "tscam_conv.weight": (7, 32, 2, 3),
        "tscam_conv.bias": (7,),
        "head.weight": (7, 7),
        "head.bias": (7,),
    }
    shapes |= {"layers.0.blocks.1.attn_mask": (4, 64, 64)}
    named |= {f"audio_branch.{name}": torch.randn(shape) for name, shape in shapes.items()}
    named |= saved_front_end()
    transforms = ("audio_transform.sequential.0.weight", "text_transform.sequential.0.weight")
    named |= dict.fromkeys(transforms, torch.randn(32, 32))
    return named | {"text_branch.embeddings.position_ids": torch.randn(1, 66)}


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("save", [torch.save, partial(torch.save, pickle_protocol=4), save_legacy])
def test_files_as_laion_writes_them_load(tmp_path: Path, save: Callable[..., None]) -> None:
    reference = REFERENCES["micro"]()
    randomise(reference.named(), 8)
    state = {name: tensor.detach().clone() for name, tensor in reference.named().items()}
    expected = renamed_checkpoint(MICRO, state, transformers_names, "the reference").build()
    bare = laion_state(state)
    for content in (bare, published(bare)):
        save(content, tmp_path / "clap.pt")
        for config in (MICRO, None):
            found = load_weights(tmp_path / "clap.pt", config)
            model = found.build()
            assert found.config == MICRO
            assert_same(without_classifier(model), without_classifier(expected))
            assert torch.equal(
                model.audio.tscam_conv.weight, bare["audio_branch.tscam_conv.weight"]
            )
            assert torch.equal(model.audio.head.bias, bare["audio_branch.head.bias"])


@pytest.fixture(scope="module")
def laion() -> dict[str, Tensor]:
    """Return a state dict with LAION's names and without the constants and transforms that LAION's
    training saves."""
    torch.manual_seed(2)
    return to_names(ClapModel(MICRO).state_dict(), laion_names) | saved_front_end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_front_end_in_any_precision_is_accepted(
    tmp_path: Path, laion: dict[str, Tensor], dtype: torch.dtype
) -> None:
    torch.save({name: tensor.to(dtype) for name, tensor in laion.items()}, tmp_path / "clap.pt")
    assert load_weights(tmp_path / "clap.pt").config == MICRO


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"size": 1536},
            r"conv_real.*\(769, 1, 1536\).*\(513, 1, 1024\).*stft_window",
        ),  # as HTSAT-tiny-win-1536
        ({"window": "hamming"}, "conv_real"),
        ({"fmin": 0}, "melW"),
        ({"rate": 32000}, "melW"),
    ],
)
def test_another_front_end_is_refused_with_what_differs(
    tmp_path: Path, laion: dict[str, Tensor], changes: dict[str, Any], reason: str
) -> None:
    theirs = laion | saved_front_end(**changes)
    torch.save({name: tensor.bfloat16() for name, tensor in theirs.items()}, tmp_path / "clap.pt")
    for config in (MICRO, None):
        with pytest.raises(ValueError, match=rf"clap\.pt .*front end.*{reason}"):
            load_weights(tmp_path / "clap.pt", config)
    tower = {name: tensor for name, tensor in theirs.items() if name.startswith("audio_branch.")}
    torch.save(tower, tmp_path / "htsat.ckpt")
    assert load_weights(tmp_path / "htsat.ckpt", MICRO).is_audio_tower


def test_a_preset_with_the_front_end_of_the_file_loads_it(
    tmp_path: Path, laion: dict[str, Tensor]
) -> None:
    config = MICRO.model_copy(
        update={"audio": MICRO.audio.model_copy(update={"stft_window": 1536})}
    )
    torch.save(laion | saved_front_end(size=1536), tmp_path / "clap.pt")
    assert load_weights(tmp_path / "clap.pt", config).config == config


@pytest.mark.parametrize(
    ("keys", "prefix"),
    [
        ([], "_orig_mod."),
        ([], "model."),
        (["model"], ""),
        (["module"], "module._orig_mod."),
        (["model_state_dict"], "clap.module."),
        (["weights"], "module."),
        (["checkpoint", "model"], "a.b."),
        (["model", "model"], ""),
    ],
)
def test_dicts_and_prefixes_around_tensors_make_no_difference(
    tmp_path: Path, laion: dict[str, Tensor], keys: list[str], prefix: str
) -> None:
    content: dict[str, Any] = {f"{prefix}{name}": tensor for name, tensor in laion.items()}
    for key in reversed(keys):
        optimizer = {"state": {number: {"step": torch.ones(1)} for number in range(2)}}
        content = {"optimizer": optimizer, "loss": 0.5, "args": {"lr": 1e-4}, key: content}
    torch.save(content, tmp_path / "clap.pt")
    found = load_weights(tmp_path / "clap.pt")
    assert found.config == MICRO
    assert torch.equal(found.state["audio.batch_norm.weight"], laion["audio_branch.bn0.weight"])


def test_tensors_of_averaging_losses_and_optimizers_make_no_difference(
    tmp_path: Path, laion: dict[str, Tensor]
) -> None:
    model = {f"model.{name}": tensor for name, tensor in laion.items()}
    averaged = {f"module.{name}": tensor for name, tensor in laion.items()}
    for content in (
        {"n_averaged": torch.ones(()), **averaged},
        {"state_dict": {**model, "criterion.weight": torch.ones(1)}},
        {"net": laion, "optimizer": {"exp_avg": torch.ones(1)}},
    ):
        torch.save(content, tmp_path / "clap.pt")
        assert load_weights(tmp_path / "clap.pt").config == MICRO


def test_a_file_of_two_models_is_refused_with_their_prefixes(
    tmp_path: Path, laion: dict[str, Tensor]
) -> None:
    both = {
        f"{prefix}.{name}": tensor for prefix in ("model", "ema") for name, tensor in laion.items()
    }
    torch.save(both, tmp_path / "clap.pt")
    with pytest.raises(ValueError, match=r"2 models.*model\., ema\."):
        load_weights(tmp_path / "clap.pt")


def test_towers_compiled_one_by_one_load(tmp_path: Path, laion: dict[str, Tensor]) -> None:
    compiled = {
        name.replace("_branch.", "_branch._orig_mod."): tensor for name, tensor in laion.items()
    }
    torch.save({"module": compiled, "loss": torch.zeros(())}, tmp_path / "clap.pt")
    assert load_weights(tmp_path / "clap.pt").config == MICRO


def test_a_missing_text_scale_is_no_obstacle(tmp_path: Path, laion: dict[str, Tensor]) -> None:
    torch.save(
        {name: tensor for name, tensor in laion.items() if name != "logit_scale_t"},
        tmp_path / "clap.pt",
    )
    assert (
        load_weights(tmp_path / "clap.pt").build().logit_scale.item()
        == laion["logit_scale_a"].item()
    )


PANN = {
    "audio_branch.bn0.weight": torch.ones(64),
    "audio_branch.conv_block1.conv1.weight": torch.ones(64, 1, 3, 3),
}
BERT = {"text_branch.embeddings.word_embeddings.weight": torch.ones(30522, 1)}
MSCLAP = {
    "audio_encoder.base.htsat.bn0.weight": torch.ones(64),
    "caption_encoder.base.h.0.attn.c_attn.weight": torch.ones(2, 2),
}


def test_other_models_and_contents_are_named(tmp_path: Path, laion: dict[str, Tensor]) -> None:
    for content, reason in (
        ({"model": MSCLAP, "epoch": 3}, "Microsoft's CLAP.*model, epoch"),
        ({"state_dict": PANN}, "PANN"),
        (laion | BERT, "BERT"),
        (laion | {"text_branch.shared.weight": torch.ones(1)}, "BART"),
        ({"audio_model.audio_encoder.norm.weight": torch.ones(1)}, "ClapModel.*folder"),
        ({"first": laion, "second": laion, "epoch": 3}, "first, second, epoch"),
        ({"epoch": 3, "model": {"depth": 2}}, "epoch, model"),
        ([laion], "list"),
        ({name: tensor for name, tensor in laion.items() if "tower" in name}, "expected weights"),
        (
            {name: t for name, t in laion.items() if "layers.0.blocks.0.norm1" not in name},
            r"fit micro\. missing: \S*norm1",
        ),
    ):
        torch.save(content, tmp_path / "clap.pt")
        with pytest.raises(ValueError, match=rf"clap\.pt: .*{reason}"):
            load_weights(tmp_path / "clap.pt")


@pytest.mark.parametrize(
    "name",
    [
        "clap_htsat_tiny_roberta_base",
        "laion_htsat_base_roberta_base",
        "clap_htsat_tiny_roberta_base_fused",
        "demo",
    ],
)
def test_sizes_are_told_by_the_tensors(tmp_path: Path, name: str) -> None:
    tiny = load_preset("clap_htsat_tiny_roberta_base")
    base = load_preset("htsat_base_roberta_base")
    audio = base.audio.model_copy(update={"projection": tiny.audio.projection})
    # music_audioset_epoch_15_esc_90.14.pt and its like: HTSAT-base with heads of 512
    music = tiny.model_copy(update={"name": name, "audio": audio})
    config = music if name.startswith("laion") else load_preset(name)
    with torch.device("meta"):
        named = to_names(ClapModel(config).state_dict(), laion_names)
    # Zeros take no space in a file.
    state = {
        key: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for key, tensor in named.items()
    }
    assert all(tensor.shape == () for key, tensor in state.items() if key.startswith("logit_scale"))
    torch.save(published(state), tmp_path / "clap.pt", pickle_protocol=4)
    found = load_weights(tmp_path / "clap.pt")
    assert (found.config, found.tokenizer) == (config, None if name == "demo" else "roberta-base")


class Reduced:
    """Pickle as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """Support pickled calls of a call's result."""


@pytest.mark.parametrize(("protocol", "as_zip"), [(2, False), (4, True)])
def test_nothing_in_a_file_is_run(tmp_path: Path, protocol: int, as_zip: bool) -> None:
    marker = tmp_path / "marker"
    plain = tmp_path / "inner.pt"
    make = f"open({str(marker)!r}, 'w')"
    parts = torch._utils._rebuild_tensor_v2
    torch.save(Reduced(eval, make), plain)
    for name, content in (
        ("posix.system", Reduced(os.system, f"touch '{marker}'")),
        ("exec", {"state_dict": {"module.a": [Reduced(exec, make)]}}),
        ("getattr", Reduced(Reduced(getattr, marker, "touch"))),
        ("torch.serialization.load", Reduced(torch.load, str(plain), None, None)),
        (
            "open",
            Reduced(parts, Reduced(open, str(marker), "w"), 0, (1,), (1,), False, OrderedDict()),
        ),
        ("PosixPath", {"args": Path("code")}),
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
def test_archives_of_code_are_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "code.pt")
    with pytest.raises(ValueError, match=r"code\.pt: can't be read.*TorchScript"):
        load_weights(tmp_path / "code.pt", MICRO)


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
def test_a_file_that_becomes_an_archive_of_code_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "code.pt")
    load = torch.load

    def before(path: Any, **options: Any) -> Any:
        if options["weights_only"]:
            raise pickle.UnpicklingError("it was another file then")
        return load(path, **options)

    monkeypatch.setattr(torch, "load", before)
    with pytest.raises(ValueError, match=r"code\.pt: .*TorchScript"):
        load_weights(tmp_path / "code.pt", MICRO)


def test_attributes_of_a_dictionary_are_ignored(tmp_path: Path, laion: dict[str, Tensor]) -> None:
    content = OrderedDict(laion)
    content.get = torch.ones(1)  # type: ignore[method-assign]
    torch.save(content, tmp_path / "clap.pt")
    assert load_weights(tmp_path / "clap.pt").config == MICRO
