"""Test that DeepSpeed's profiler agrees exactly with the closed form and the published FLOPs and
parameters."""

import re
from collections.abc import Callable

import pytest

from clap_ds.config.model import AudioConfig, ClapConfig, ProjectionConfig, TextConfig, load_preset
from clap_ds.flop_count import counters
from clap_ds.flop_count.analytic import CONVENTIONS, Convention, TextLengths, forward_components
from clap_ds.flop_count.published_model import build_published_model
from clap_ds.model.clap import ClapModel
from tests.processes import ROOT

TINY = "htsat_tiny_roberta_base"
BASE = "htsat_base_roberta_base"
LAION = "clap_htsat_tiny_roberta_base"
BUILDERS: dict[Convention, Callable[[ClapConfig], ClapModel]] = {
    "published": build_published_model,
    "model": counters.build,
}

# Three stages, odd depths, a last grid smaller than the window, different widths.
ODD = ClapConfig(
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
FUSED = ODD.model_copy(update={"audio": ODD.audio.model_copy(update={"fusion": True})})
MICRO = load_preset("micro")
BERT = MICRO.model_copy(update={"text": MICRO.text.model_copy(update={"architecture": "bert"})})


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    ("config", "tokens"),
    [(MICRO, 66), (ODD, 17), (FUSED, 17), (BERT, 23)],
    ids=["micro", "odd", "fused", "bert"],
)
def test_profiler_agrees_with_closed_form_to_the_last_flop(config, tokens, convention):
    expected = forward_components(config, TextLengths.fixed(tokens), convention)
    count = counters.count_by_deepspeed(BUILDERS[convention](config), tokens)
    assert sum(count) == expected["forward"]
    # FFTs are all that the profiler misses, and the published model has none.
    assert count.ffts == (expected["fft"] if convention == "model" else 0)


@pytest.mark.parametrize(("preset", "gflops"), [(TINY, 111.1967), (BASE, 130.0878)])
def test_profiler_alone_counts_the_published_figure(preset, gflops):
    count = counters.count_by_deepspeed(build_published_model(load_preset(preset)), 514)
    assert (count.counted / 1e9, count.ffts) == (pytest.approx(gflops, abs=1e-4), 0)


def test_recorded_profile_and_docs_state_the_profilers_figure():
    components = forward_components(load_preset(TINY), TextLengths.fixed(77), "model")
    gflops = (components["forward"] - components["fft"]) / 1e9
    page = (ROOT / "analysis" / "FLOPS.md").read_text()
    assert re.findall(r"itself sees ([\d.]+) of them", page) == [f"{gflops:.4f}"]
    report = (ROOT / "results" / "flops" / "deepspeed_profile_htsat_tiny_cpu.txt").read_text()
    assert re.findall(r"fwd MACs per GPU: +(.+)", report) == [f"{gflops / 2:.2f} GMACs"]


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        # Trained are all but 1.0835 M of frozen STFT and mel matrices, and the AudioSet head.
        (TINY, (32.51, 125.23, 157.74, 153.95)),
        (BASE, (74.52, 125.66, 200.18, 195.58)),
        (LAION, (31.98, 125.30, 157.28, 153.49)),
        # Of XLM-RoBERTa and E5-small, 192.0 and 96.0 are the vocabulary.
        ("htsat_tiny_xlm_roberta_base", (32.51, 278.63, 311.14, 307.35)),
        ("htsat_tiny_multilingual_e5_small", (32.51, 118.17, 150.68, 146.89)),
    ],
)
def test_parameters_equal_open_clips_counts(preset, millions):
    counts = counters.parameter_counts(counters.build(load_preset(preset)))
    names = ("audio", "text", "total", "trainable")
    assert [counts[name] / 1e6 for name in names] == pytest.approx(millions, abs=0.006)
