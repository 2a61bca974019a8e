"""Towers by native blocks against the same towers by torch in fp32, no less exact than torch's in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clap_ds.config.model import load_preset
from clap_ds.model.htsat import HTSAT
from clap_ds.model.packed import pack
from clap_ds.model.text import TextTower
from clap_ds.native import blocks as native_blocks
from clap_ds.native import library
from tests.kernels import needs_amx

pytestmark = needs_amx

DEMO = load_preset("demo")
LENGTHS = torch.tensor([24, 3, 17, 1])


def as_used(model: nn.Module) -> nn.Module:
    """Weights far from their initial zeros and ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.manual_seed(len(name))
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + noise / 4)
    return model.train()


def audio_tower(attention: str, drop_path: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return as_used(HTSAT(DEMO.audio, drop_path=drop_path, spec_augment=False, attention=attention))


def text_tower(attention: str, pooling: str = "cls_pooler", dropout: float = 0.0) -> nn.Module:
    config = DEMO.text.model_copy(update={"pooling": pooling})
    return as_used(TextTower(config, dropout=dropout, from_hub=False, attention=attention))


def mels(clips: int = 3) -> Tensor:
    audio = DEMO.audio
    return torch.randn(clips, audio.num_frames, audio.mel_bins, generator=torch.Generator().manual_seed(0)) * 10 - 20


def captions() -> tuple[Tensor, Tensor]:
    mask = (torch.arange(24) < LENGTHS[:, None]).long()
    ids = torch.randint(5, DEMO.text.vocab_size, (4, 24), generator=torch.Generator().manual_seed(1))
    return torch.where(mask.bool(), ids, 1), mask


def results(model: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """Output and gradients of all parameters, in fp32."""
    output = model(*inputs)
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output.float() * probe).sum().backward()
    found = {name: parameter.grad.float() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {"output": output.detach().float()}


def assert_as_exact_as_torch(build: Callable[[str], nn.Module], torchs: str, *inputs: Any) -> None:
    exact = results(build(torchs), *inputs)
    low = build(torchs).to(torch.bfloat16)
    with library.torch_instead():
        theirs = results(low, *inputs)
    ours = results(build("auto").to(torch.bfloat16), *inputs)
    assert ours.keys() == exact.keys()
    for name, wanted in exact.items():
        error, usual = (float((each[name] - wanted).norm()) for each in (ours, theirs))
        if not name.endswith("key.bias"):  # whose gradient is 0 but for rounding
            assert error <= 1.3 * usual + 1e-3 * float(wanted.norm()), name


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the native blocks that run."""
    names: list[str] = []

    def spied(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return real(*args, **kwargs)

        return spy

    for name in ("swin_block", "patch_merging", "text_layer"):
        monkeypatch.setattr(native_blocks, name, spied(name, getattr(native_blocks, name)))
    return names


def test_audio_tower(used: list[str]) -> None:
    assert_as_exact_as_torch(audio_tower, "matmul", mels())
    assert (used.count("swin_block"), used.count("patch_merging")) == (4, 1)


@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
@pytest.mark.parametrize("form", ["full", "padded", "packed"])
def test_text_tower(form: str, pooling: str, used: list[str]) -> None:
    ids, mask = captions()
    inputs = {"full": (ids.clamp(min=5), None), "padded": (ids, mask), "packed": pack_all(ids, mask)}[form]
    assert_as_exact_as_torch(lambda attention: text_tower(attention, pooling), "auto", *inputs)
    assert used == ["text_layer"] * 2


def pack_all(ids: Tensor, mask: Tensor) -> tuple[Any, ...]:
    row, packing = pack([(ids, mask)])
    return row, None, packing


def test_recomputed_blocks_give_the_same() -> None:
    plain, checkpointed = (audio_tower("auto", drop_path=0.5).to(torch.bfloat16) for _ in range(2))
    checkpointed.checkpoint_activations(True)
    found = []
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        found.append(results(model, mels()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_recomputed_text_layers_give_the_same(used: list[str]) -> None:
    plain, checkpointed = (text_tower("auto", dropout=0.1).to(torch.bfloat16) for _ in range(2))
    checkpointed.checkpoint_activations(True)
    found = []
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        found.append(results(model, *captions()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert len(used) == 2 + 4  # twice each where they are recomputed


def test_dropout_of_captions_is_unbiased_and_follows_torchs_seed() -> None:
    tower, (ids, mask) = text_tower("auto", "mean", dropout=0.1).to(torch.bfloat16), captions()
    torch.manual_seed(4)
    first, other = tower(ids, mask), tower(ids, mask)
    torch.manual_seed(4)
    assert torch.equal(tower(ids, mask), first)
    assert not torch.equal(other, first)
    still = tower.eval()(ids, mask).float()
    mean = torch.stack([tower.train()(ids, mask).float() for _ in range(200)]).mean(dim=0)
    spread = (first.float() - still).norm()
    assert (mean - still).norm() < 0.5 * spread


def test_dropout_of_attention_weights_alone() -> None:
    tower, inputs = text_tower("auto", "mean").to(torch.bfloat16), captions()
    still = tower(*inputs)
    for layer in tower.roberta.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    assert not torch.equal(tower(*inputs), still)
    assert torch.equal(tower.eval()(*inputs), still)


def test_other_kernels_and_dtypes_leave_blocks_to_torch(used: list[str]) -> None:
    audio_tower("matmul").to(torch.bfloat16)(mels())
    audio_tower("auto")(mels())
    text_tower("sdpa").to(torch.bfloat16)(*captions())
    text_tower("torch").to(torch.bfloat16)(*captions())
    text_tower("auto")(*captions())
    assert used == []
