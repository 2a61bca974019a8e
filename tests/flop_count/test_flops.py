"""The FLOPs command and its picture, and the profiler section of a bench run, say what they should."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler

from clap_ds import flops
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.data.batch import Batch
from clap_ds.flop_count import analytic
from clap_ds.flop_count.analytic import CONVENTIONS, TextLengths, forward_components, forward_flops, published_flops
from clap_ds.flop_count.counters import Count, build, parameter_counts, run_one_sample
from clap_ds.measuring.flops_profile import disagreement_warnings, measure_flops, unknown_kernels
from clap_ds.model.clap import ClapModel
from tests.processes import ROOT

WriteRun = Callable[..., Path]


def test_warning_above_half_a_percent() -> None:
    warned = [bool(disagreement_warnings(25 * (1 + percent / 100), 25)) for percent in (-0.6, -0.4, 0, 0.4, 0.6)]
    assert warned == [True, False, False, False, True]


def test_a_model_that_does_more_than_the_closed_form_knows_is_reported() -> None:
    report = flops.make_report(load_preset("micro"), 8, {})
    exact = report["model"]["analytic"] * 1e9
    agreeing, off = Count(exact - 7, {"FFT": 7.0}), Count(report["published"]["analytic"] * 1e9 * 1.01)
    assert "agrees with the closed form" in flops.agreement(report, {"model": {"deepspeed": agreeing}})
    both: flops.Counts = {"published": {"torch": off}, "model": {"deepspeed": agreeing}}
    assert "NOT EXPLAINED: counters and the closed form are 1.0000 % apart" in flops.agreement(report, both)


def test_json_report(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    flops.main(["--deepspeed_config", str(write_run()), "--text_tokens", "9", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["preset"], report["text_tokens"]) == ("micro", 9)
    assert set(report["parameters"]) == {"audio", "text", "total", "trainable"}
    config, lengths = load_preset("micro"), TextLengths.fixed(9)
    for convention in CONVENTIONS:
        section = report[convention]
        expected = forward_flops(config, lengths, convention) / 1e9
        assert [section[name] for name in ("analytic", "deepspeed", "torch")] == pytest.approx(
            [expected] * 3, rel=1e-12
        )
        assert section["components"]["forward"] == section["analytic"]
        training = (
            3 * expected if convention == "published" else expected + analytic.backward_flops(config, lengths) / 1e9
        )
        assert section["training"] == pytest.approx(training)


def test_tables_at_the_length_of_the_run(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of the table, and of the line on parameters."""
    flops.main(["--deepspeed_config", str(write_run())])
    printed = capsys.readouterr().out
    assert "16 text tokens" in printed
    assert "agrees with the closed form to the last FLOP" in printed
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    config, lengths, model = load_preset("micro"), TextLengths.fixed(16), build(load_preset("micro"))
    published, done = (forward_components(config, lengths, convention) for convention in CONVENTIONS)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    run_one_sample(model, 16)
    own = profiler.get_total_flops()
    profiler.end_profile()
    whole = published["forward"], done["forward"]
    seen = whole[0], whole[1] - done["fft"]
    expected = [
        ("DeepSpeed's profiler, 2 × MACs, by itself", seen), ("torch's FlopCounterMode, by itself", seen),
        *[("+ FFT, which it can't see", (0, done["fft"])), ("in all", whole)] * 2,
        ("closed form, from the settings", whole),
        ("with the backward pass", (3 * whole[0], whole[1] + analytic.backward_flops(config, lengths))),
        *((("of the stages: " if name in analytic.STAGE_VIEWS else "") + name.replace("_", " "), (published[name], done[name]))
          for name in done),
    ]  # fmt: skip
    shown = [(name, *(f"{value / 1e9:.4f}" if value else "–" for value in values)) for name, values in expected]
    (by_its_own,) = [row for row in rows if row[0].startswith('(its "flops"')]
    assert by_its_own[2] == f"{own / 1e9:.4f}" != f"{seen[1] / 1e9:.4f}"
    assert sorted(tuple(row) for row in rows if len(row[-1]) > 0 and row is not by_its_own) == sorted(shown)
    counts = {name: f"{number / 1e6:.2f}" for name, number in parameter_counts(model).items()}
    assert "audio {audio}, text {text}, total {total} as".format(**counts) in printed
    assert f"trained {sum(p.numel() for p in ClapModel(config).parameters()) / 1e6:.2f}" in printed


def test_fed_features(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    flops.main(["--deepspeed_config", str(write_run()), "--audio", "mel"])
    printed = capsys.readouterr().out
    assert "16 text tokens, fed log-mel features" in printed
    assert "agrees with the closed form to the last FLOP" in printed
    assert "FFT, which it can't see" not in printed
    expected = forward_flops(load_preset("micro"), TextLengths.fixed(16), "model", front_end=False)
    assert f"{expected / 1e9:.4f}" in printed


@pytest.mark.parametrize("frozen", [(), ("text",), ("audio",)])
def test_a_run_counts_what_it_does(write_run: WriteRun, frozen: tuple[str, ...]) -> None:
    """Of waveforms and of features, with frozen towers, recomputation and a second forward pass."""
    config, lengths, ids = load_preset("micro"), TextLengths.fixed(16), torch.ones(2, 16, dtype=torch.long)
    model = ClapModel(config)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    recompute = {"preset": "micro", "checkpoint_activations": ["audio"], "drop_path": 0.2}
    settings = {"model": recompute, "train": {"accumulation": "cached"}}
    run, plain = load_run(write_run(clap=settings)), load_run(write_run())
    trained = [name for name in ("audio", "text") if name not in frozen]
    again = analytic.recomputed_flops(config, lengths, ("audio",), drop_path=0.2) if "audio" in trained else 0
    for front_end, shape in ((True, (config.audio.num_samples,)), (False, config.audio.feature_shape)):
        forward = forward_flops(config, lengths, "model", front_end=front_end)
        expected = {
            "model_gflops": forward / 1e9,
            "published_gflops": published_flops(config, front_end=front_end) / 1e9,
            "training_gflops": (forward + analytic.backward_flops(config, lengths, trained=trained)) / 1e9,
        }
        for own, repeated in ((run, forward + again), (plain, 0)):
            engine, batches = SimpleNamespace(model=model), iter([Batch(torch.zeros(2, *shape), ids, ids)])
            session: Any = SimpleNamespace(run=own, engine=engine, batches=batches)
            found, warnings = measure_flops(session)
            assert found | expected | {"recomputed_gflops": pytest.approx(repeated / 1e9)} == found
            assert warnings == []


def test_what_the_profiler_cannot_see_is_said(write_run: WriteRun) -> None:
    profiler = {"enabled": True, "profile_step": 9}
    model = ClapModel(load_preset("micro"))
    ids, audio = torch.ones(2, 16, dtype=torch.long), torch.zeros(2, load_preset("micro").audio.num_samples)
    for steps, clap, said in (
        (8, {}, "profile_step is 9, the run has 8 steps"),
        (9, {"compile": "towers"}, "'towers'"),
    ):
        run, engine = load_run(write_run(flops_profiler=profiler, clap=clap)), SimpleNamespace(steps=steps, model=model)
        session: Any = SimpleNamespace(run=run, engine=engine, batches=iter([Batch(audio, ids, ids)]))
        (warning,) = measure_flops(session)[1]
        assert said in warning
        assert "not profiled" in warning
    assert unknown_kernels(model) == []
    for part in model.modules():
        if hasattr(part, "kernel"):
            part.kernel = "triton"
    assert unknown_kernels(model) == ["clap.model.attention 'triton'", "clap.model.mlp 'triton'"]


def test_text_lengths_beyond_the_model(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--deepspeed_config", str(write_run()), "--counters", "analytic", "--text_tokens"]
    for tokens in ("0", "67"):
        with pytest.raises(UserError, match=r"expected 1 to 66.*numbers positions from 2"):
            flops.main([*arguments, tokens])
    for tokens in ("64", "65"):
        flops.main([*arguments, tokens])
        assert (f"{tokens} tokens can be counted but not run" in capsys.readouterr().out) is (tokens == "65")


def test_utilization_of_a_rate(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(peak_tflops: float | None, rate: str) -> str:
        path = write_run(clap={"hardware": {"peak_tflops": peak_tflops}})
        flops.main(["--deepspeed_config", str(path), "--counters", "analytic", "--samples_per_s", rate])
        return capsys.readouterr().out

    config, lengths = load_preset("micro"), TextLengths.fixed(16)
    done = forward_flops(config, lengths, "model") + analytic.backward_flops(config, lengths)
    percents = [100 * each * 1000 / 3e12 for each in (3 * published_flops(config), done)]
    assert "MFU {:.1f} % published, {:.1f} % model, of 3 TFLOPS".format(*percents) in shown(3.0, "1000")
    assert "no MFU: the peak of" in shown(None, "1000")
    assert "overstates by design" not in shown(3.0, "1000")
    impossible = shown(0.01, "1000")
    assert "overstates by design" in impossible
    assert "the rate or the peak must be wrong" in impossible
    with pytest.raises(UserError, match="--samples_per_s 0: expected a number above 0"):
        shown(None, "0")


def test_closed_form_needs_no_torch(tmp_path: Path) -> None:
    """As on a login node: importing torch or DeepSpeed is an error there."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = sys.modules['deepspeed'] = None\n")
    command = "-m clap_ds.flops --deepspeed_config ds_configs/htsat_base.json --counters analytic --json --text_tokens"
    options: Any = {"cwd": ROOT, "env": {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}, "timeout": 60}
    commands = [[sys.executable, *command.split(), tokens] for tokens in ("514", "515")]
    found, refused = (subprocess.run(each, capture_output=True, text=True, **options) for each in commands)
    assert found.returncode == 0, found.stderr
    assert f"{json.loads(found.stdout)['published']['analytic']:.4f}" == "130.0878"
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "515: expected 1 to 514" in refused.stderr
