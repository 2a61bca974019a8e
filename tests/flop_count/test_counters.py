"""Three counters agree to the last FLOP and reproduce the published figures; parameters match the built model."""

from __future__ import annotations

import pytest
import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from clap_ds.config.model import AudioConfig, ClapConfig, ProjectionConfig, TextConfig, load_preset, preset_names
from clap_ds.flop_count import counters as flops_counters
from clap_ds.flop_count.analytic import (
    CONVENTIONS,
    Convention,
    TextLengths,
    forward_components,
    forward_flops,
    parameter_counts,
    published_flops,
)
from clap_ds.model.clap import ClapModel

TINY, BASE = "htsat_tiny_roberta_base", "htsat_base_roberta_base"

# Published convention at 514 tokens, from the project's page of checked figures (GFLOPs, four decimals).
PUBLISHED_TABLE = {
    "mel": (0.0657, 0.0657),
    "patch_embedding": (0.0126, 0.0168),
    "stage_0": (2.1643, 3.7581),
    "stage_1": (2.0636, 3.6239),
    "stage_2": (5.7378, 19.9984),
    "stage_3": (1.8371, 3.2548),
    "block_linears": (10.8716, 28.9910),
    "patch_mergings": (0.4530, 0.8053),
    "tscam_conv": (0.1554, 0.2072),
    "audio_projection": (0.0013, 0.0042),
    "audio_tower": (14.1412, 33.0325),
    "text_linears": (87.3128, 87.3128),
    "text_attention": (9.7393, 9.7393),
    "text_pooler": (0.0012, None),
    "text_projection": (0.0013, 0.0032),
    "text_tower": (97.0546, 97.0554),
    "forward": (111.1958, 130.0878),
}


def _gflops(preset: str, tokens: int, convention: Convention = "published") -> dict[str, float]:
    components = forward_components(load_preset(preset), TextLengths.fixed(tokens), convention)
    return {name: value / 1e9 for name, value in components.items()}


@pytest.mark.parametrize(("index", "preset"), [(0, TINY), (1, BASE)])
def test_every_row_of_the_published_table(index: int, preset: str) -> None:
    found = _gflops(preset, 514)
    for name, values in PUBLISHED_TABLE.items():
        expected = values[index]
        assert (name in found) == (expected is not None), name
        if expected is not None:
            assert f"{found[name]:.4f}" == f"{expected:.4f}", name
    # 1001 frames × two convolutions × 513 bins × 1024 taps; the page's last digit (2.1034) is rounded up from 2.10335.
    assert found["stft_convolution"] == 2 * 1001 * 2 * 513 * 1024 / 1e9
    # Depth × tokens × two products × 64 tokens of a window × channels, summed over stages.
    blocks = [2, 2, 6 if index == 0 else 12, 2]
    width = 96 if index == 0 else 128
    by_hand = sum(2 * n * (64 >> s) ** 2 * 2 * 64 * (width << s) for s, n in enumerate(blocks)) / 1e9
    assert found["window_attention"] == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx((0.4781, 0.8389)[index], abs=1e-4)
    assert set(found) == {*PUBLISHED_TABLE, "stft_convolution", "window_attention"} - (
        {"text_pooler"} if index else set()
    )


@pytest.mark.parametrize(
    ("preset", "tokens", "expected"),
    [(TINY, 512, 110.7804), (BASE, 512, 129.6724), (TINY, 77, 27.4422), (BASE, 77, 46.3342)],
)
def test_published_convention_at_other_lengths(preset: str, tokens: int, expected: float) -> None:
    assert f"{_gflops(preset, tokens)['forward']:.4f}" == f"{expected:.4f}"


def test_published_figure_does_not_depend_on_the_run() -> None:
    assert [f"{published_flops(load_preset(name)) / 1e9:.2f}" for name in (TINY, BASE)] == ["111.20", "130.09"]


@pytest.mark.parametrize(("preset", "expected"), [(TINY, "111.1958"), (BASE, "130.0878")])
def test_all_counters_give_the_published_figure(preset: str, expected: str) -> None:
    config = load_preset(preset)
    for count in (flops_counters.count_by_deepspeed, flops_counters.count_by_torch):
        assert f"{count(config, 514, 'published').total / 1e9:.4f}" == expected


def odd_config() -> ClapConfig:
    """Sizes unlike every preset's: three stages, odd depths, a last grid below the window, other widths everywhere."""
    return ClapConfig(
        name="odd",
        audio=AudioConfig(
            sample_rate=16000, num_samples=12000, stft_window=256, hop_size=100, mel_bins=32, fmin=20, fmax=7000,
            image_size=64, patch_size=4, embed_dim=24, depths=[1, 3, 2], num_heads=[2, 3, 6], attention_window=8,
            mlp_ratio=3, num_classes=11, projection=ProjectionConfig(hidden_dim=20, activation="gelu", bias=False),
        ),
        text=TextConfig(
            hub_name="", vocab_size=97, max_positions=40, hidden_size=36, num_layers=3, num_heads=4,
            intermediate_size=52, pooling="mean", projection=ProjectionConfig(hidden_dim=28, activation="relu", bias=True),
        ),
        joint_dim=44,
    )  # fmt: skip


CASES = [
    (load_preset(TINY), 77),
    (load_preset("htsat_large_roberta_base"), 5),
    (load_preset("micro"), 1),
    (load_preset("micro"), 66),
    (odd_config(), 17),
    (odd_config(), 40),
]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("config", "tokens"), CASES, ids=[f"{c.name}-{tokens}" for c, tokens in CASES])
def test_counters_agree_to_the_last_flop(config: ClapConfig, tokens: int, convention: Convention) -> None:
    expected = forward_flops(config, TextLengths.fixed(tokens), convention)
    by_deepspeed = flops_counters.count_by_deepspeed(config, tokens, convention)
    by_torch = flops_counters.count_by_torch(config, tokens, convention)
    assert by_deepspeed.total == expected
    assert by_torch.total == expected
    # What was added is what each counter is known not to see, no more.
    assert set(by_deepspeed.unseen) == ({flops_counters.FFT} if convention == "model" else set())
    attention = sum(
        value
        for name, value in forward_components(config, TextLengths.fixed(tokens), convention).items()
        if name in ("window_attention", "text_attention")
    )
    assert by_torch.unseen[flops_counters.ATTENTION] == attention


def test_profiling_twice_does_not_accumulate() -> None:
    config = load_preset("micro")
    first, second = (flops_counters.count_by_deepspeed(config, 8, "model") for _ in range(2))
    assert first == second


def test_model_convention_has_what_this_engine_executes() -> None:
    published, model = _gflops(TINY, 77), _gflops(TINY, 77, "model")
    assert {"fft", "stretch"} == set(model) - set(published)
    assert {"stft_convolution", "tscam_conv"} == set(published) - set(model)
    assert model["fft"] == pytest.approx(1001 * 2.5 * 1024 * 10 / 1e9)
    assert model["stretch"] == pytest.approx(2 * 64 * 1001 * 1024 / 1e9)


def test_components_add_up() -> None:
    for preset in preset_names():
        for convention in CONVENTIONS:
            found = _gflops(preset, 20, convention)
            views = found["block_linears"] + found["window_attention"] + found["patch_mergings"]
            assert views == pytest.approx(sum(value for name, value in found.items() if name.startswith("stage_")))
            assert found["forward"] == pytest.approx(found["audio_tower"] + found["text_tower"])


def test_packed_captions_cost_their_own_length() -> None:
    config = load_preset(TINY)
    mixed = forward_components(config, TextLengths.histogram({10: 3, 50: 1}), "model")
    alone = {n: forward_components(config, TextLengths.fixed(n), "model") for n in (10, 50)}
    for name, value in mixed.items():
        assert value == pytest.approx((3 * alone[10][name] + alone[50][name]) / 4, rel=1e-12), name


@pytest.mark.parametrize("config", [*map(load_preset, preset_names()), odd_config()], ids=lambda config: config.name)
def test_parameters_match_the_built_model(config: ClapConfig) -> None:
    with torch.device("meta"):
        model = ClapModel(config)
    counts = parameter_counts(config)
    assert counts.trainable == sum(parameter.numel() for parameter in model.parameters())
    towers = (model.text, model.text_projection)
    assert counts.text == sum(parameter.numel() for tower in towers for parameter in tower.parameters())
    unused = sum(tensor.numel() for held in (model.audio.tscam_conv, model.audio.head) for tensor in held.buffers())
    num_bins = config.audio.stft_window // 2 + 1
    frozen = 2 * num_bins * config.audio.stft_window + num_bins * config.audio.mel_bins
    assert counts.audio == counts.trainable - 1 - counts.text + unused + frozen
    assert counts.total == counts.audio + counts.text + 1


@pytest.mark.parametrize(("preset", "expected"), [(TINY, (31.98, 125.30, 157.28)), (BASE, (74.52, 125.66, 200.18))])
def test_parameters_as_open_clip_counts_them(preset: str, expected: tuple[float, ...]) -> None:
    counts = parameter_counts(load_preset(preset))
    assert tuple(round(n / 1e6, 2) for n in (counts.audio, counts.text, counts.total)) == expected


class _Broadcasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x + torch.matmul(self.weight, x)


def test_broadcast_products_deepspeed_counts_once_are_noticed() -> None:
    x = torch.ones(6, 4, 5)
    model = nn.Sequential(_Broadcasting())
    with FlopCounterMode(display=False) as truth:
        model(x)
    found = flops_counters.profile_by_deepspeed(FlopsProfiler(model), lambda: model(x))
    assert truth.get_total_flops() == 2 * (2 * 6 * 3 * 4 * 5)
    assert found.counted == truth.get_total_flops() / 6
    assert found.total == truth.get_total_flops()


def test_functions_are_as_before_after_profiling() -> None:
    before = (torch.stft, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
    flops_counters.count_by_deepspeed(load_preset("micro"), 4, "model")
    assert (torch.stft, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) == before
