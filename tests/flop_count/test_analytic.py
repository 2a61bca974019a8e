"""Test the closed form against every row of the published table, this engine's differences, and
recomputation."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.engine.factory import freeze
from clap_ds.flop_count import analytic
from clap_ds.flop_count.analytic import Convention, TextLengths, forward_components
from clap_ds.model.clap import ClapModel

TINY = "htsat_tiny_roberta_base"
BASE = "htsat_base_roberta_base"
LAION = "clap_htsat_tiny_roberta_base"

# Published convention at 514 tokens, from the project's page of checked figures (GFLOPs, four
# decimals).
PUBLISHED_TABLE = {
    "mel": (0.0657, 0.0657), "patch_embedding": (0.0126, 0.0168), "stage_0": (2.1643, 3.7581), "stage_1": (2.0636, 3.6239),
    "stage_2": (5.7378, 19.9984), "stage_3": (1.8371, 3.2548), "block_linears": (10.8716, 28.9910),
    "patch_mergings": (0.4530, 0.8053), "tscam_conv": (0.1554, 0.2072), "audio_projection": (0.0024, 0.0042),
    "audio_tower": (14.1422, 33.0325), "text_linears": (87.3128, 87.3128), "text_attention": (9.7393, 9.7393),
    "text_pooler": (0.0, 0.0), "text_projection": (0.0024, 0.0032), "text_tower": (97.0545, 97.0554),
    "forward": (111.1967, 130.0878),
}  # fmt: skip


def _gflops(preset: str, tokens: int, convention: Convention = "published") -> dict[str, float]:
    components = forward_components(load_preset(preset), TextLengths.fixed(tokens), convention)
    return {name: value / 1e9 for name, value in components.items()}


@pytest.mark.parametrize(("index", "preset"), [(0, TINY), (1, BASE)])
def test_every_row_of_the_published_table(index: int, preset: str) -> None:
    found = _gflops(preset, 514)
    for name, values in PUBLISHED_TABLE.items():
        assert f"{found[name]:.4f}" == f"{values[index]:.4f}", name
    # 1001 frames × two convolutions × 513 bins × 1024 taps; the page's last digit (2.1034) is
    # rounded up from 2.10335.
    assert found["stft_convolution"] == 2 * 1001 * 2 * 513 * 1024 / 1e9
    assert found["window_attention"] == pytest.approx((0.4781, 0.8389)[index], abs=1e-4)
    assert found["fft"] == found["stretch"] == 0
    assert set(found) == {
        *PUBLISHED_TABLE,
        "stft_convolution",
        "window_attention",
        "fft",
        "stretch",
    }


@pytest.mark.parametrize(
    ("preset", "published", "expected", "training"),
    [
        (TINY, "111.20", {77: "27.4431", 512: "110.7813", 514: "111.1967"}, "75.7095"),
        (BASE, "130.09", {77: "46.3342", 512: "129.6724", 514: "130.0878"}, "132.2274"),
        (LAION, "111.20", {77: "27.4422", 512: "110.7804", 514: "111.1958"}, "73.2861"),
    ],
)
def test_published_convention_by_length_and_a_training_sample(
    preset: str, published: str, expected: dict[int, str], training: str
) -> None:
    config = load_preset(preset)
    lengths = TextLengths.fixed(77)
    assert {tokens: f"{_gflops(preset, tokens)['forward']:.4f}" for tokens in expected} == expected
    assert f"{analytic.published_flops(config) / 1e9:.2f}" == published
    done = analytic.forward_flops(config, lengths, "model") + analytic.backward_flops(
        config, lengths
    )
    assert f"{done / 1e9:.4f}" == training


def test_what_this_engine_executes_and_how_components_add_up() -> None:
    model = _gflops(TINY, 77, "model")
    assert model["stft_convolution"] == model["tscam_conv"] == 0
    assert model["fft"] == pytest.approx(1001 * 2.5 * 1024 * 10 / 1e9)
    assert model["stretch"] == pytest.approx(2 * 64 * 1001 * 1024 / 1e9)
    for preset in preset_names():
        for convention in analytic.CONVENTIONS:
            found = _gflops(preset, 20, convention)
            stages = sum(value for name, value in found.items() if name.startswith("stage_"))
            assert sum(found[name] for name in analytic.STAGE_VIEWS) == pytest.approx(stages)
            assert found["forward"] == pytest.approx(found["audio_tower"] + found["text_tower"])


def test_packed_captions_cost_their_own_length() -> None:
    lengths = TextLengths.of([10, 10, 50, 10])
    assert (lengths.mean, lengths.mean_square) == (20, (3 * 100 + 2500) / 4)
    mixed = forward_components(load_preset(TINY), lengths, "model")
    alone = {
        n: forward_components(load_preset(TINY), TextLengths.fixed(n), "model") for n in (10, 50)
    }
    for name, value in mixed.items():
        assert value == pytest.approx((3 * alone[10][name] + alone[50][name]) / 4, rel=1e-12), name


def _counted(config: ClapConfig, **options: Any) -> tuple[int, int]:
    """Count one sample's forward and backward pass with torch's counter."""
    frozen = options.pop("frozen", ())
    shape = options.pop("audio", (config.audio.num_samples,))
    model = ClapModel(config, attention="matmul", **options).train()
    freeze(model, frozen)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        audio, text, scale = model(torch.rand(2, *shape), torch.full((2, 12), 5), None)
        forward = counter.get_total_flops()
        (scale * audio * text).sum().backward()
    return forward // 2, (counter.get_total_flops() - forward) // 2


LENGTHS = TextLengths.fixed(12)


@pytest.mark.parametrize("preset", ["micro", "demo"])
@pytest.mark.parametrize("trained", [("audio", "text"), ("audio",), ("text",)])
def test_the_backward_pass_that_there_is(preset: str, trained: tuple[str, ...]) -> None:
    config = load_preset(preset)
    frozen = {"audio", "text"} - set(trained)
    shapes = [(config.audio.num_samples,)] + [config.audio.feature_shape] * (not frozen)
    for shape in shapes:
        components = forward_components(config, LENGTHS, "model", front_end=len(shape) == 1)
        expected = (
            components["forward"] - components["fft"],
            analytic.backward_flops(config, LENGTHS, trained=trained),
        )
        assert _counted(config, frozen=frozen, audio=shape) == expected


@pytest.mark.parametrize("drop_path", [0.0, 0.1])
@pytest.mark.parametrize("checkpointed", [("audio",), ("text",), ("audio", "text")])
def test_recomputed_flops_are_what_checkpointing_adds(
    drop_path: float, checkpointed: tuple[str, ...]
) -> None:
    config = load_preset("demo")
    (_, less), (_, more) = (
        _counted(config, drop_path=drop_path, activation_checkpointing=towers)
        for towers in ((), checkpointed)
    )
    assert more - less == analytic.recomputed_flops(
        config, LENGTHS, checkpointed, drop_path=drop_path
    )
