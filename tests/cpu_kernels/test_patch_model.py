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
from tests.model.reference_clap import clips, randomise

pytestmark = needs_kernels

DEMO = load_preset("demo")
BF16 = torch.bfloat16


def as_used(model: nn.Module) -> nn.Module:
    """Draw weights far from their initial zeros and ones."""
    randomise(model.state_dict(), 0)
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
    noise = torch.randn(3, *DEMO.audio.feature_shape, generator=torch.Generator().manual_seed(0))
    return (noise * 10 - 20,)


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
    tensors = {"output": output.detach().float()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[name] = parameter.grad.float()
    return tensors


def kinds(model: nn.Module) -> dict[str, int]:
    return Counter(
        type(module).__name__ for module in model.modules() if isinstance(module, NATIVE)
    )


def assert_within_roundings(build: Callable[[], nn.Module], inputs: tuple[Any, ...]) -> None:
    """Compare a tower in bf16 with torch's operations in fp32. Some gradients are small differences
    of large sums, and have 23 roundings of their size as error, with torch's operations as with
    ours. Most have 3 to 5."""
    expected = results(build(), inputs)
    tensors = results(native(build()), inputs)
    assert tensors.keys() == expected.keys()
    for name, exact in expected.items():
        # The gradient of the keys' bias is 0 up to rounding.
        if not name.endswith("key.bias"):
            assert (tensors[name] - exact).norm() <= 48 * ROUNDING * exact.norm(), name


def test_native_audio_tower_is_exact_to_roundings():
    assert_within_roundings(audio_tower, mels())
    assert kinds(native(audio_tower())) == {
        "NativePatchEmbed": 1,
        "NativeSwinBlock": 4,
        "NativePatchMerging": 1,
    }


@pytest.mark.parametrize(
    ("form", "pooling"),
    [("full", "mean"), ("padded", "mean"), ("padded", "cls_pooler"), ("packed", "cls_pooler")],
)
def test_native_text_tower_is_exact_to_roundings(form, pooling):
    assert_within_roundings(functools.partial(text_tower, pooling), captions(form))
    assert kinds(native(text_tower(pooling))) == {"NativeTextLayer": 2}


def test_native_front_end_equals_plain_one_and_has_gradients():
    plain, patched = (LogMel(DEMO.audio) for _ in range(2))
    patch_model.patch_model(patched)
    waveforms = clips(3, DEMO.audio.num_samples, 0)
    assert not torch.equal(patched(waveforms), plain(waveforms)), "no kernel has run"
    torch.testing.assert_close(patched(waveforms), plain(waveforms), rtol=1e-4, atol=1e-3)
    assert torch.equal(patched(waveforms.requires_grad_()), plain(waveforms))
    assert torch.equal(patched.double()(waveforms), plain.double()(waveforms))


def test_patched_model_keeps_parameters_hooks_and_copies():
    model = ClapModel(DEMO, text_dropout=0.0, attention="matmul").to(BF16)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    hooked: list[str] = []
    for block in (*model.audio.blocks(), *model.text.blocks()):
        block.register_forward_hook(lambda module, *_: hooked.append(type(module).__name__))
    patch_model.patch_model(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    copy.deepcopy(model)(clips(4, DEMO.audio.num_samples, 0), *captions())
    assert hooked == ["NativeSwinBlock"] * 4 + ["NativeTextLayer"] * 2


@pytest.mark.parametrize(
    ("build", "inputs"), [(audio_tower, mels()), (text_tower, captions())], ids=["audio", "text"]
)
def test_unpatched_compiled_and_fp32_models_run_torch_operations(build, inputs):
    patched = native(build())
    plain = build().to(BF16)
    with torch.no_grad():
        assert not torch.equal(patched(*inputs), plain(*inputs))
        with unpatched(patched):
            assert torch.equal(patched(*inputs), plain(*inputs))
        patched.compile(backend="eager")
        assert torch.equal(patched(*inputs), plain(*inputs))
    fp32 = build()
    patch_model.patch_model(fp32)
    torch.testing.assert_close(results(fp32, inputs), results(build(), inputs), rtol=0, atol=0)


def test_unsupported_blocks_stay(monkeypatch):
    """Kernels selected by name, unsupported sizes, and everything if kernels can't run or are
    disabled."""
    assert "NativeSwinBlock" not in kinds(native(audio_tower("sdpa")))
    supported = ("NativeLogMel", "NativePatchEmbed", "NativeSwinBlock", "NativePatchMerging")
    micro = native(ClapModel(load_preset("micro"), attention="matmul"))
    assert kinds(micro) == dict.fromkeys(supported, 1)
    assert report("auto") == f"native ({supported_implementations()[0]})"
    assert report("off") == 'torch: clap.cpu_kernels is "off"'
    monkeypatch.setattr(patch_model, "unavailable", lambda: "no compiler found")
    assert report("auto") == "torch: no compiler found"
    assert not kinds(native(audio_tower()))
