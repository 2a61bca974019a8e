"""`auto` is the quickest kernel that is right, found once, and the same on every rank and after every restart."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.dist.agreement import rank
from clap_ds.engine import kernels
from clap_ds.engine.kernel_trials import AttentionSite, MlpSite, Site
from clap_ds.engine.kernels import choose_kernels
from clap_ds.engine.trial_processes import Conditions, Found
from clap_ds.model.clap import ClapModel
from clap_ds.model.kernel_choice import KernelChoice, Launch
from clap_ds.record.schema import KernelRecord, SiteRecord
from tests.conftest import micro_run
from tests.processes import ROOT, TIMEOUT_S
from tests.ranks import RankPool

CPU = torch.device("cpu")
FEW, MANY = (KernelChoice("triton", Launch(warps, 2), Launch(8, 1)) for warps in (2, 8))
ATTENTION = "attention 16×16×16, 2 heads, 8×8 windows"
SHIFTED = f"{ATTENTION}, shift 4"


def settings(**model: Any) -> RunSettings:
    content = micro_run(clap={"model": {"preset": "micro", **model}})
    return RunSettings(Path("run.json"), ClapSettings.model_validate(content.pop("clap")), content)


BY_DEFAULT = settings()


def fresh_model(run: RunSettings) -> ClapModel:
    return ClapModel(run.clap.preset(), attention=run.clap.model.attention, device=torch.device("meta"))


def candidates(site: Site) -> list[KernelChoice]:
    return [KernelChoice("sdpa" if isinstance(site, AttentionSite) else "torch"), FEW, MANY]


class Trials:
    """In place of `try_kernels`: finds out what it is told, for each site alike, of at most so many."""

    def __init__(self, found: Found, problem: str | None = None) -> None:
        self.found, self.problem, self.tried = found, problem, list[Site]()

    def __call__(self, known: dict[Site, Found], conditions: Conditions) -> str | None:
        self.tried += [site for site in known if known[site].keys() < self.found.keys()]
        for found in known.values():
            found |= self.found
        return self.problem


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare(monkeypatch, tmp_path)


def prepare(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """An empty cache, and kernels to choose from that are there on every machine."""
    patch.setenv("XDG_CACHE_HOME", str(cache))
    for site in (AttentionSite, MlpSite):
        patch.setattr(site, "candidates", candidates)


Choose = Callable[..., tuple[KernelRecord, str, list[Site]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Choose:
    """Chooses after trials that find out this; the record, what was printed, and which sites had to be tried."""

    def run(
        found: Found, problem: str | None = None, recorded: Any = None, settings: RunSettings = BY_DEFAULT
    ) -> tuple[KernelRecord, str, list[Site]]:
        trials = Trials(found, problem)
        monkeypatch.setattr(kernels, "try_kernels", trials)
        record = choose_kernels(settings, fresh_model(settings), CPU, recorded or {})
        return record, capsys.readouterr().out, trials.tried

    return run


EACH: Found = {
    "sdpa": 0.004,
    "torch": 0.004,
    str(FEW): 0.002,
    str(MANY): "its output is off by 0.3 of the largest value",
}


def test_the_quickest_that_is_right_is_taken_said_and_recorded(choose: Choose) -> None:
    record, printed, _ = choose(EACH | {"sdpa": 0.001})
    attention = record["sites"][SHIFTED]
    assert attention["kernel"] == "sdpa"
    assert attention["ms"] == {"sdpa": 1.0, "triton 2w2s/8w1s": 2.0}
    assert attention["problems"] == {"triton 8w2s/8w1s": EACH[str(MANY)]}
    assert record["sites"]["MLP 8×8×32, ratio 4"]["kernel"] == "triton 2w2s/8w1s"
    assert (record["source"], printed.count("\n")) == ("tried", 1)
    assert "MLP 8×8×32, ratio 4: triton 2w2s/8w1s 2.00, torch 4.00" in printed
    assert f"{SHIFTED}: sdpa 1.00;" in printed
    assert f"can't be taken (triton 8w2s/8w1s at {ATTENTION}: its output is off by" in printed


def test_modules_get_what_their_site_has_and_named_kernels_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def trials(known: dict[Site, Found], conditions: Conditions) -> None:
        for site, found in known.items():
            found |= EACH | {str(MANY): 0.001 if isinstance(site, AttentionSite) and site.shift else 0.009}

    monkeypatch.setattr(kernels, "try_kernels", trials)
    run = settings(mlp="torch")
    model = fresh_model(run)
    assert set(choose_kernels(run, model, CPU, {})["sites"]) == {
        ATTENTION,
        SHIFTED,
        "attention 8×8×32, 4 heads, 8×8 windows",
    }
    blocks = [block for stage in model.audio.stages for block in stage.blocks]
    assert [block.attention.kernel for block in blocks] == [MANY if block.shift else FEW for block in blocks]
    assert {block.mlp.kernel for block in blocks} == {KernelChoice("torch")}
    run = settings(attention="sdpa", mlp="torch")
    assert choose_kernels(run, fresh_model(run), CPU, {}) == {}


def test_where_there_is_one_kernel_nothing_is_tried(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlpSite, "candidates", lambda site: candidates(site)[:1])
    record, _, tried = choose(EACH)
    assert {*tried} == {site for site in tried if isinstance(site, AttentionSite)}
    assert len(record["sites"]) == len(tried)
    monkeypatch.setattr(AttentionSite, "candidates", lambda site: candidates(site)[:1])
    assert choose(EACH, settings=settings(preset="micro"))[:2] == ({}, "")


def test_a_second_run_tries_nothing_and_another_setting_does(choose: Choose) -> None:
    first, _, tried = choose(EACH)
    assert len(tried) == len(first["sites"])
    second, printed, tried = choose({})
    assert (second["sites"], second["source"], tried) == (first["sites"], "cache", [])
    assert "tried before" in printed
    fp32 = RunSettings(Path("run.json"), settings().clap, {"train_micro_batch_size_per_gpu": 4})
    larger = RunSettings(
        Path("run.json"), settings().clap, settings().deepspeed | {"train_micro_batch_size_per_gpu": 8}
    )
    for other in (fp32, larger):
        assert len(choose(EACH, settings=other)[2]) == len(first["sites"])
    assert choose({})[0]["source"] == "cache"


@pytest.mark.parametrize("what", ["torch", "source", "device"])
def test_what_was_tried_elsewhere_is_not_taken(choose: Choose, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    choose(EACH)
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif what == "source":
        monkeypatch.setattr(kernels, "_source", lambda: "another")
    else:
        monkeypatch.setattr(kernels, "device_name", lambda device: "NVIDIA X100")
    assert choose(EACH)[0]["source"] == "tried"


def test_what_there_was_no_time_for_is_tried_by_the_next_run_also_one_that_resumes(choose: Choose) -> None:
    recorded, printed, _ = choose({}, "time was over")
    assert {site["kernel"] for site in recorded["sites"].values()} == {"sdpa", "torch"}
    assert recorded["sites"][SHIFTED]["untried"] == ["sdpa", str(FEW), str(MANY)]
    assert "not all have been tried (time was over)" in printed
    assert f"{SHIFTED}: sdpa;" in printed
    settled: SiteRecord = {"kernel": str(MANY), "ms": {}, "problems": {}, "untried": []}
    record, _, tried = choose(EACH, recorded={**recorded, "sites": recorded["sites"] | {ATTENTION: settled}})
    assert (record["source"], len(tried)) == ("tried", len(record["sites"]) - 1)
    assert {name for name, site in record["sites"].items() if site["kernel"] != str(FEW)} == {ATTENTION}
    assert list(map(str, choose(EACH, recorded=recorded)[2])) == [ATTENTION]
    record, _, tried = choose({}, recorded=recorded)
    assert (record["source"], record["sites"][ATTENTION]["kernel"], tried) == ("cache", str(FEW), [])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"x": 3}', '{"x": {"sdpa": -1.0}}', '{"x": {"sdpa": true}}', "\0\xff"]
)
def test_a_corrupt_cache_is_said_and_done_without(choose: Choose, tmp_path: Path, content: str) -> None:
    cache = tmp_path / "clap_ds" / "kernels.json"
    cache.parent.mkdir()
    cache.write_text(content, encoding="latin-1")
    record, printed, _ = choose(EACH)
    assert record["sites"][SHIFTED]["kernel"] == str(FEW)
    assert (printed.count("\n"), f"note: {cache} can't be read (" in printed) == (2, True)
    assert choose({})[0]["source"] == "cache"


def test_a_cache_that_cannot_be_written_is_said_and_done_without(choose: Choose, tmp_path: Path) -> None:
    (tmp_path / "clap_ds").write_text("in the way")
    record, printed, _ = choose(EACH)
    assert record["sites"][SHIFTED]["kernel"] == str(FEW)
    assert "kernels.json can't be written (" in printed


def test_other_runs_results_stay_in_the_cache(choose: Choose, tmp_path: Path) -> None:
    choose(EACH)
    cache = tmp_path / "clap_ds" / "kernels.json"
    cache.write_text(json.dumps({"another's": {"sdpa": 1.0}, **json.loads(cache.read_text())}))
    choose(EACH, settings=RunSettings(Path("run.json"), settings().clap, {"train_micro_batch_size_per_gpu": 4}))
    assert len(json.loads(cache.read_text())) == 1 + 2 * len(choose({})[0]["sites"])


def test_resuming_takes_what_was_recorded_if_it_can(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, _, _ = choose(EACH)
    found, printed, tried = choose(EACH | {"sdpa": 1e-9}, recorded=recorded)
    assert (found["sites"], found["source"], tried) == (recorded["sites"], "checkpoint", [])
    assert "as in the checkpoint" in printed
    found, printed, _ = choose(EACH, recorded={**recorded, "device": "NVIDIA X100"})
    assert found["source"] == "cache"
    assert "they were chosen on NVIDIA X100, this is" in printed
    sites = {**recorded["sites"], SHIFTED: {**recorded["sites"][SHIFTED], "kernel": "triton 99w9s/9w9s"}}
    found, printed, _ = choose(EACH, recorded={**recorded, "sites": sites})
    assert found["source"] == "cache"
    assert f"triton 99w9s/9w9s for {SHIFTED} can't be had here; chosen anew" in printed
    sites = {site: found for site, found in recorded["sites"].items() if site != SHIFTED}
    assert f"there is none for {SHIFTED}" in choose(EACH, recorded={**recorded, "sites": sites})[1]
    for site in (AttentionSite, MlpSite):  # as without Triton
        monkeypatch.setattr(site, "candidates", lambda site: candidates(site)[:1])
    found, printed, _ = choose(EACH, recorded=recorded)
    assert (found, printed.count(f"{FEW} for {ATTENTION} can't be had here; chosen anew")) == ({}, 1)


def _choose_on_a_rank(cache: str, is_lacking: bool) -> tuple[str, KernelRecord, list[KernelChoice]]:
    """Each rank would find another kernel the quickest; rank 1 may lack what rank 0 has."""
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch, Path(cache, f"{rank()}, {is_lacking}"))
        trials = Trials({"sdpa": 0.003, "torch": 0.003, str(FEW): 0.002, str(MANY): 0.001 + 9 * rank()})
        patch.setattr(kernels, "try_kernels", trials)
        model = fresh_model(settings())
        if is_lacking and rank() == 1:
            patch.setattr(AttentionSite, "candidates", lambda site: candidates(site)[:1])
        try:
            record = choose_kernels(settings(), model, CPU, {})
        except ValueError as error:
            return str(error), {}, []
        assert bool(trials.tried) == (rank() == 0)
        return "", record, [block.attention.kernel for stage in model.audio.stages for block in stage.blocks]


def test_ranks_agree(two_ranks: RankPool, tmp_path: Path) -> None:
    (_, first, ours), (_, second, theirs) = two_ranks.run(_choose_on_a_rank, str(tmp_path), False)
    assert first == second
    assert ours == theirs
    assert set(ours) == {MANY}
    (no_problem, *_), (problem, *_) = two_ranks.run(_choose_on_a_rank, str(tmp_path), True)
    assert no_problem == ""
    assert f"'auto' on rank 0 is {MANY} for {ATTENTION}, which this rank doesn't have" in problem


@pytest.fixture
def real_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.undo()


def _choose_on_a_gpu(cache: str) -> tuple[list[KernelRecord], float]:
    device = torch.device("cuda", 0)
    run = settings()
    model = ClapModel(run.clap.preset(), attention="auto", mlp="auto", device=device).to(device, torch.bfloat16)
    os.environ["XDG_CACHE_HOME"] = cache
    records = [choose_kernels(run, model, device, {}) for _ in range(2)]
    tokens = torch.randn(4, 16, 16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    output = model.audio.stages[0](tokens)
    output.sum().backward()
    assert tokens.grad is not None
    return records, float(tokens.grad.float().abs().max())


@pytest.mark.gpu
def test_kernels_are_tried_on_a_gpu(real_candidates: None, one_gpu: RankPool, tmp_path: Path) -> None:
    (((first, second), largest),) = one_gpu.run(_choose_on_a_gpu, str(tmp_path))
    assert (first["source"], second["source"]) == ("tried", "cache")
    assert all(len(site["ms"]) > 1 for site in first["sites"].values())
    assert not [why for site in first["sites"].values() for why in site["problems"].values() if why.startswith("its ")]
    assert 0 < largest < float("inf")


@pytest.mark.gpu
@pytest.mark.end_to_end
def test_a_run_on_a_gpu_says_and_records_its_kernels(write_run: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "clap_ds/bench.py", "--deepspeed_config", str(write_run())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    (shown,) = (line for line in ended.stdout.splitlines() if line.startswith("kernels on "))
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json"))
    assert summary["kernels"]["source"] == "tried"
    assert all(f"{site}: {found['kernel']}" in shown for site, found in summary["kernels"]["sites"].items())
