"""Test state dicts of other projects, and that malicious files are read without running code."""

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import renamed_checkpoint
from clap_ds.weights.key_mapping import laion_names, to_names, transformers_names
from clap_ds.weights.load import load_weights
from tests.model.reference_clap import REFERENCES, randomise
from tests.weights.test_formats import MICRO, assert_same, without_classifier

TO_LAION = """audio_model.audio_encoder audio_branch, attention.self attn, attention.output.dense attn.proj,
intermediate.dense mlp.fc1, output.dense mlp.fc2, layernorm_before norm1, layernorm_after norm2, batch_norm bn0"""


def laion_state(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Build a LAION-CLAP state dict from a transformers one, renamed by hand, with LAION's additional parts."""
    named: dict[str, Tensor] = {}
    for name, tensor in source.items():
        if name.startswith("audio_model"):
            if ".self.key." in name or ".self.value." in name:
                continue
            if ".self.query." in name:
                tensor = torch.cat([source[name.replace("query", part)] for part in ("query", "key", "value")])
                name = name.replace("self.query", "self.qkv")
            for pair in TO_LAION.split(","):
                name = name.replace(*pair.split())
        named[name.replace("text_model", "text_branch").replace("linear1", "0").replace("linear2", "2")] = tensor
    shapes = {"tscam_conv.weight": (7, 32, 2, 3), "tscam_conv.bias": (7,), "head.weight": (7, 7), "head.bias": (7,)}
    shapes |= {"spectrogram_extractor.stft.conv_real.weight": (513, 1, 1024), "logmel_extractor.melW": (513, 16)}
    shapes |= {"layers.0.blocks.1.attn_mask": (4, 64, 64)}
    named |= {f"audio_branch.{name}": torch.randn(shape) for name, shape in shapes.items()}
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
    return {"epoch": np.int64(15), "name": "run", "optimizer": optimizer, "scaler": {}, "state_dict": wrapped}


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
            assert torch.equal(model.audio.tscam_conv.weight, bare["audio_branch.tscam_conv.weight"])
            assert torch.equal(model.audio.head.bias, bare["audio_branch.head.bias"])


@pytest.mark.parametrize(
    "name",
    ["clap_htsat_tiny_roberta_base", "laion_htsat_base_roberta_base", "clap_htsat_tiny_roberta_base_fused", "demo"],
)
def test_sizes_are_told_by_the_tensors(tmp_path: Path, name: str) -> None:
    tiny, base = load_preset("clap_htsat_tiny_roberta_base"), load_preset("htsat_base_roberta_base")
    audio = base.audio.model_copy(update={"projection": tiny.audio.projection})
    # music_audioset_epoch_15_esc_90.14.pt and its like: HTSAT-base with heads of 512
    music = tiny.model_copy(update={"name": name, "audio": audio})
    config = music if name.startswith("laion") else load_preset(name)
    with torch.device("meta"):
        named = to_names(ClapModel(config).state_dict(), laion_names)
    # Zeros take no space in a file.
    state = {key: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for key, tensor in named.items()}
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
    marker, plain = tmp_path / "marker", tmp_path / "inner.pt"
    make, parts = f"open({str(marker)!r}, 'w')", torch._utils._rebuild_tensor_v2
    torch.save(Reduced(eval, make), plain)
    for name, content in (
        ("posix.system", Reduced(os.system, f"touch '{marker}'")),
        ("exec", {"state_dict": {"module.a": [Reduced(exec, make)]}}),
        ("getattr", Reduced(Reduced(getattr, marker, "touch"))),
        ("torch.serialization.load", Reduced(torch.load, str(plain), None, None)),
        ("open", Reduced(parts, Reduced(open, str(marker), "w"), 0, (1,), (1,), False, OrderedDict())),
        ("PosixPath", {"args": Path("code")}),
    ):
        torch.save(content, tmp_path / "clap.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=as_zip)
        with pytest.raises(ValueError, match=rf"it refers to \S*{name}"):
            load_weights(tmp_path / "clap.pt", MICRO)
        assert not marker.exists()


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
def test_archives_of_code_are_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "code.pt")
    with pytest.raises(ValueError, match=r"code\.pt: can't be read.*TorchScript"):
        load_weights(tmp_path / "code.pt", MICRO)
