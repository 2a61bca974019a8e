"""Test converted towers against torch in fp32 (no less exact than torch's bf16), and that nothing
else changes."""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clap_ds.config.model import load_preset
from clap_ds.cpu_kernels import patch_model
from clap_ds.cpu_kernels.jit_build import supported_implementations
from clap_ds.cpu_kernels.patch_model import NATIVE, report, unpatched
from clap_ds.model.clap import ClapModel
from clap_ds.model.htsat import HTSAT
from clap_ds.model.mel import LogMel
from clap_ds.model.packed import pack
from clap_ds.model.text import TextTower
from tests.cpu_kernels.exactness import ROUNDING
from tests.kernels import needs_kernels
from tests.model.reference_clap import clips

pytestmark = needs_kernels

DEMO = load_preset("demo")
BF16 = torch.bfloat16


def as_used(model: nn.Module) -> nn.Module:
    """Set weights far from their initial zeros and ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.manual_seed(len(name))
            noise = torch.randn(parameter.shape)
            parameter.copy_(
                noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + noise / 4
            )
    return model.train()


def audio_tower(attention: str = "matmul", drop_path: float = 0.0) -> Any:
    torch.manual_seed(0)
    tower = HTSAT(DEMO.audio, drop_path=drop_path, spec_augment=False)
    tower.use_kernels(attention, "torch")
    return as_used(tower)


def text_tower(pooling: str = "mean") -> Any:
    config = DEMO.text.model_copy(update={"pooling": pooling})
    return as_used(TextTower(config, dropout=0.0))


def native(model: nn.Module) -> Any:
    patch_model.patch_model(model.to(BF16))
    return model


def mels() -> tuple[Tensor]:
    audio = DEMO.audio
    return (
        torch.randn(3, audio.num_frames, audio.mel_bins, generator=torch.Generator().manual_seed(0))
        * 10
        - 20,
    )


def captions(form: str = "padded") -> tuple[Any, ...]:
    mask = (torch.arange(24) < torch.tensor([24, 3, 17, 1])[:, None]).long()
    ids = torch.randint(
        5, DEMO.text.vocab_size, (4, 24), generator=torch.Generator().manual_seed(1)
    )
    if form == "full":
        return ids, None
    if form == "padded":
        return torch.where(mask.bool(), ids, 1), mask
    row, packing = pack([(ids, mask)])
    return row, None, packing


def results(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the output and all parameters' gradients in fp32."""
    torch.manual_seed(3)
    output = model(*inputs)
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output.float() * probe).sum().backward()
    found = {
        name: parameter.grad.float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return found | {"output": output.detach().float()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def kinds(model: nn.Module) -> dict[str, int]:
    return Counter(
        type(module).__name__ for module in model.modules() if isinstance(module, NATIVE)
    )


def assert_within_roundings(build: Callable[[], nn.Module], inputs: tuple[Any, ...]) -> None:
    """Compare a tower in bf16 with torch's operations in fp32. Some gradients are small differences
    of large sums, and have 23 roundings of their size as error, with torch's operations as with
    ours. Most have 3 to 5."""
    exact = results(build(), inputs)
    ours = results(native(build()), inputs)
    assert ours.keys() == exact.keys()
    for name, wanted in exact.items():
        if not name.endswith("key.bias"):  # its gradient is 0 up to rounding
            assert float((ours[name] - wanted).norm()) <= 48 * ROUNDING * float(wanted.norm()), name


def test_audio_tower() -> None:
    assert_within_roundings(audio_tower, mels())
    assert kinds(native(audio_tower())) == {
        "NativePatchEmbed": 1,
        "NativeSwinBlock": 4,
        "NativePatchMerging": 1,
    }


@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
@pytest.mark.parametrize("form", ["full", "padded", "packed"])
def test_text_tower(form: str, pooling: str) -> None:
    assert_within_roundings(functools.partial(text_tower, pooling), captions(form))
    assert kinds(native(text_tower(pooling))) == {"NativeTextLayer": 2}


def test_front_end_is_the_same_and_has_gradients() -> None:
    plain, ours = (LogMel(DEMO.audio) for _ in range(2))
    patch_model.patch_model(ours)
    waveforms = clips(3, DEMO.audio.num_samples, 0)
    assert not torch.equal(ours(waveforms), plain(waveforms)), "no kernel has run"
    torch.testing.assert_close(ours(waveforms), plain(waveforms), rtol=1e-4, atol=1e-3)
    assert torch.equal(ours(waveforms.requires_grad_()), plain(waveforms))
    assert torch.equal(ours.double()(waveforms), plain.double()(waveforms))


def test_parameters_hooks_and_copies_stay() -> None:
    """Hooks on blocks and layers run once per forward pass, whether added before or after the
    conversion."""
    model = ClapModel(DEMO, text_dropout=0.0, attention="matmul")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    seen: list[str] = []
    note = lambda module, inputs, output: seen.append(type(module).__name__)  # noqa: E731
    for layer in model.text.roberta.encoder.layer:
        layer.register_forward_hook(note)
    patch_model.patch_model(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    blocks = model.audio.blocks()
    for block in blocks:
        block.register_forward_hook(note)
    model.to(BF16)
    for each in (model, copy.deepcopy(model)):
        seen.clear()
        each(clips(4, DEMO.audio.num_samples, 0), *captions())
        assert seen == ["NativeSwinBlock"] * len(blocks) + ["NativeTextLayer"] * 2


def test_reverted_and_in_other_dtypes_and_compiled_it_is_torchs() -> None:
    for build, inputs in ((audio_tower, mels()), (text_tower, captions())):
        ours = native(build())
        plain = build().to(BF16)
        with torch.no_grad():
            output = ours(*inputs)
            assert not torch.equal(output, plain(*inputs))
            with unpatched(ours):
                assert torch.equal(ours(*inputs), plain(*inputs))
                assert not kinds(ours)
            assert torch.equal(ours(*inputs), output)
            ours.compile(backend="eager")
            assert torch.equal(ours(*inputs), plain(*inputs))
        converted = build()
        patch_model.patch_model(converted)
        assert_same(results(converted, inputs), results(build(), inputs))


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels selected by name, unsupported sizes, and everything if kernels can't run or are
    disabled."""
    assert "NativeSwinBlock" not in kinds(native(audio_tower("sdpa")))
    micro = {
        "NativeLogMel": 1,
        "NativePatchEmbed": 1,
        "NativeSwinBlock": 1,
        "NativePatchMerging": 1,
    }
    assert kinds(native(ClapModel(load_preset("micro"), attention="matmul"))) == micro
    assert report("auto") == f"native ({supported_implementations()[0]})"
    assert report("off") == 'torch: clap.cpu_kernels is "off"'
    monkeypatch.setattr(patch_model, "unavailable", lambda: "no compiler found")
    assert report("auto") == "torch: no compiler found"
    assert not kinds(native(audio_tower()))
