"""Test that DeepSpeed's profiler agrees exactly with the closed form and the published FLOPs and
parameters."""

import re
from collections.abc import Callable

import pytest

from clap_ds.config.model import AudioConfig, ClapConfig, ProjectionConfig, TextConfig, load_preset
from clap_ds.flop_count import counters
from clap_ds.flop_count.analytic import CONVENTIONS, Convention, TextLengths, forward_components
from clap_ds.flop_count.published_model import published_model
from clap_ds.model.clap import ClapModel
from tests.processes import ROOT

TINY = "htsat_tiny_roberta_base"
BASE = "htsat_base_roberta_base"
LAION = "clap_htsat_tiny_roberta_base"
MODELS: dict[Convention, Callable[[ClapConfig], ClapModel]] = {
    "published": published_model,
    "model": counters.build,
}


def odd_config() -> ClapConfig:
    """Return unusual sizes: three stages, odd depths, a last grid smaller than the window,
    different widths."""
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


MICRO = load_preset("micro")
BERT = MICRO.text.model_copy(update={"architecture": "bert"})
FUSED = odd_config().model_copy(
    update={"name": "fused", "audio": odd_config().audio.model_copy(update={"fusion": True})}
)
CASES = [
    (MICRO, 66),
    (odd_config(), 17),
    (FUSED, 17),
    (MICRO.model_copy(update={"text": BERT}), 23),
]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    ("config", "tokens"),
    CASES,
    ids=[f"{c.name}-{c.text.architecture}-{tokens}" for c, tokens in CASES],
)
def test_the_profiler_agrees_to_the_last_flop(
    config: ClapConfig, tokens: int, convention: Convention
) -> None:
    expected = forward_components(config, TextLengths.fixed(tokens), convention)
    model = MODELS[convention](config)
    found = counters.count_by_deepspeed(model, tokens)
    assert sum(found) == expected["forward"]
    # Only what the profiler is known to miss was added.
    assert found.ffts == (expected["fft"] if convention == "model" else 0)


@pytest.mark.parametrize(("preset", "expected"), [(TINY, 111.1967), (BASE, 130.0878)])
def test_the_profiler_gives_the_published_figure_by_itself(preset: str, expected: float) -> None:
    found = counters.count_by_deepspeed(published_model(load_preset(preset)), 514)
    assert (found.counted / 1e9, found.ffts) == (pytest.approx(expected, abs=1e-4), 0)


def test_the_report_of_the_profiler_has_the_figure_that_the_page_states() -> None:
    parts = forward_components(load_preset(TINY), TextLengths.fixed(77), "model")
    seen_gflops = (parts["forward"] - parts["fft"]) / 1e9
    page = (ROOT / "analysis" / "FLOPS.md").read_text()
    assert re.findall(r"itself sees ([\d.]+) of them", page) == [f"{seen_gflops:.4f}"]
    report = (ROOT / "results" / "flops" / "deepspeed_profile_htsat_tiny_cpu.txt").read_text()
    assert re.findall(r"fwd MACs per GPU: +(.+)", report) == [f"{seen_gflops / 2:.2f} GMACs"]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (TINY, (32.51, 125.23, 157.74)),
        (BASE, (74.52, 125.66, 200.18)),
        (LAION, (31.98, 125.30, 157.28)),
    ],
)
def test_parameters_as_open_clip_counts_them(preset: str, expected: tuple[float, ...]) -> None:
    found = counters.parameter_counts(counters.build(load_preset(preset)))
    assert tuple(round(found[name] / 1e6, 2) for name in ("audio", "text", "total")) == expected
    # Including 1.0835 for the frozen STFT and mel matrices, and slightly over 1.2 or 2.4 for the
    # AudioSet head.
    assert found["audio"] + found["text"] + 1 == found["total"]
    assert (found["total"] - found["trainable"]) / 1e6 == pytest.approx(
        4.60 if preset == BASE else 3.79, abs=0.01
    )
