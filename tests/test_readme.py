"""Run commands of README and docs/ verbatim if possible, and check that the names they use
exist."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.config.reference import reference
from clap_ds.config.settings import load_run
from clap_ds.launch.cluster_profile import load_profile
from clap_ds.model.clap import ClapModel
from clap_ds.training.plan import problems_for_training
from clap_ds.weights.hub import train_tokenizer
from tests import processes
from tests.training.training_commands import ROOT, environment
from tests.weights.fake_checkpoints import checkpoint_of

NAMES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
SECTIONS = re.findall(r"^## `([\w.]+)`.*\n([^#]*)", reference(), re.MULTILINE)
FIELDS = {path for path, _ in SECTIONS} | {
    f"{path}.{field}"
    for path, table in SECTIONS
    for field in re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
}


PROFILES = ("docs/clusters.md", "docs/infiniband_nccl.md")
"""Pages whose JSON blocks are cluster profiles."""
WALKTHROUGH = r"^## From clone to scaling plot\n.*?(?=^## )"
"""Run by tests/cluster/test_walkthrough.py on a cluster."""


def blocks(kind: str, *pages: str) -> list[str]:
    text = "\n".join(PAGES[name] for name in pages or NAMES)
    text = re.sub(WALKTHROUGH, "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(rule: str, *pages: str) -> list[str]:
    lines = [
        line.removeprefix("$ ")
        for block in blocks("console", *pages)
        for line in block.splitlines()
    ]
    typed = [re.split(r"\s{2,}#", line)[0].strip() for line in lines]
    return [
        command
        for command in dict.fromkeys(typed)
        if re.fullmatch(rule, command) and "…" not in command
    ]


LOADED = commands(
    r"(deepspeed|torchrun|python) .*clap_ds/(bench|train)\.py --deepspeed_config ds_configs/\S+"
)


MAIN_COMMANDS = {
    "deepspeed --hostfile H clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json",
    "clap-ds flops --deepspeed_config ds_configs/htsat_tiny.json --context_length 514",
    "clap-ds scaling analysis/published/jupiter_htsat_tiny.csv",
    "clap-ds plot analysis/published/jupiter_htsat_{tiny,base}.csv --output scaling.png",
}


def readme_outputs() -> dict[str, list[str]]:
    """Return the lines that README shows below each command of its first section, without white
    space at their ends."""
    first_section = PAGES["README.md"].split("\n## ")[1]
    outputs: dict[str, list[str]] = {}
    for block in re.findall(r"^```console\n(.*?)^```", first_section, re.MULTILINE | re.DOTALL):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = text.splitlines()
            outputs[re.split(r"\s{2,}#", command)[0]] = [line.strip() for line in lines]
    return outputs


def test_readme_first_section_shows_the_main_commands() -> None:
    assert readme_outputs().keys() == MAIN_COMMANDS


def test_readme_benchmark_output_is_in_its_record() -> None:
    (shown,) = (
        lines for command, lines in readme_outputs().items() if command.startswith("deepspeed")
    )
    with tarfile.open(ROOT / "results" / "h200" / "step.tar.xz") as archive:
        log = archive.extractfile("step/bench.log")
        assert log is not None
        recorded = log.read().decode()
    lines = {" ".join(line.strip("│ ").replace("│", " ").split()) for line in recorded.splitlines()}
    assert len(shown) > 3
    assert {" ".join(line.split()) for line in shown} <= lines


RECORDED_RUNS = {"call1/compile_off": "call1", "call1/htsat_tiny": "call1", "step": "step"}
"""Archived run of each row of README's results on a GPU → its archive in results/h200."""


def test_readme_results_on_a_gpu_are_those_of_their_records() -> None:
    rows = re.findall(r"^\| \w{8} \(\[record\].+", PAGES["README.md"], re.MULTILINE)
    for row, (folder, record) in zip(rows, RECORDED_RUNS.items(), strict=True):
        assert f"(results/h200/{record}.md)" in row
        with tarfile.open(ROOT / "results" / "h200" / f"{record}.tar.xz") as archive:
            (name,) = (
                name
                for name in archive.getnames()
                if re.fullmatch(rf"{folder}/(run-\w+/)?summary\.json", name)
            )
            file = archive.extractfile(name)
            assert file is not None
            summary = json.load(file)
        assert row.count(" not compiled ") == ("compiled" not in summary)
        rates = summary["samples_per_s_per_gpu"]
        assert [cell.strip() for cell in row.split("|")[3:-1]] == [
            f"{rates['mean']:,.0f}",
            f"{sum(rates['window_s']):.1f} s",
            f"{1000 * summary['step_time_s']['median']:.0f} ms",
            f"{summary['memory_peak_bytes'] / 2**30:.1f} GiB",
            f"{summary['achieved_tflops']:.0f} ({summary['mfu_model_percent']:.1f}%)",
        ]


@pytest.mark.end_to_end
@pytest.mark.parametrize("program", ["flops", "scaling", "plot"])
def test_readme_command_prints_what_readme_shows(program: str, tmp_path: Path) -> None:
    ((command, shown),) = (
        item for item in readme_outputs().items() if item[0].startswith(f"clap-ds {program}")
    )
    picture = tmp_path / "scaling.png"
    shell = ["bash", "-c", "printf '%s\n' " + command.replace("scaling.png", f"'{picture}'")]
    arguments = subprocess.run(
        shell, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.splitlines()[1:]
    printed = processes.run(
        ["-m", "clap_ds", *arguments], cwd=ROOT, env=environment(), check=True
    ).stdout
    assert {*shown} <= {line.strip() for line in printed.splitlines()}
    assert picture.exists() == (program == "plot")


def test_links_lead_somewhere() -> None:
    found = [
        (name, target)
        for name, page in PAGES.items()
        for target in re.findall(r"\]\(([^)#:]+)\)", page)
    ]
    assert [each for each in found if not (ROOT / each[0]).parent.joinpath(each[1]).exists()] == []


def test_fields_that_pages_name_are_there() -> None:
    pages = (
        page for name, page in PAGES.items() if name != "docs/inference.md"
    )  # whose `clap` is a loaded model
    assert {
        field for page in pages for field in re.findall(r"`(clap(?:\.[a-z]\w*)+)", page)
    } <= FIELDS


def test_messages_shown_are_the_codes() -> None:
    """Compare four words or more in a row: numbers, hosts and paths of a message differ from run to
    run."""
    word = r"\b(?:(?!micro-batch|SIG|NCCL)[A-Za-z'-]{2,}|a)"
    phrases = re.findall(
        rf"{word}(?: {word}(?![\w.=/])){{3,}}", "".join(blocks("text", "docs/troubleshooting.md"))
    )
    files = (file for folder in ("clap_ds", "launch") for file in (ROOT / folder).rglob("*.py"))
    nodes = (
        node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )
    code = "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert len(phrases) > 10
    # The first two words may be a replacement field: "the loss".
    assert [phrase for phrase in phrases if phrase.split(" ", 2)[2] not in code] == []


def test_configurations_shown_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fsspec, "get_filesystem_class", lambda protocol: None
    )  # as if s3:// had its package
    sites = blocks("json", *PROFILES)
    runs = [
        each
        for name in NAMES
        if name not in (*PROFILES, "docs/recipes.md")
        for each in blocks("json", name)
    ]
    for block in runs:
        (tmp_path / "run.json").write_text(block)
        load_run(tmp_path / "run.json")
    for block in sites:
        (tmp_path / "cluster.json").write_text(block)
        load_profile(str(tmp_path / "cluster.json"))
    assert runs
    assert sites


@pytest.mark.parametrize("command", LOADED)
def test_programs_scripts_and_configurations_are_there(command: str) -> None:
    """Check commands that are too large to run here."""
    program, *words = shlex.split(command)
    assert (Path(sys.executable).parent / program).exists()
    script = next(word for word in words if word.endswith(".py"))
    config = words[words.index("--deepspeed_config") + 1]
    assert (ROOT / script).exists()
    run = load_run(ROOT / config)
    assert not script.endswith("train.py") or problems_for_training(run.clap, run.deepspeed) == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the checkout as cloned, and add the runs that README analyzes."""
    folder = tmp_path / "clap-ds"
    left_out = shutil.ignore_patterns(".*", "runs", "wheelhouse", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    recorded = ROOT / "tests" / "analysis" / "data" / "record_2ranks"
    for name, num_nodes in {"nodes1": 1, "nodes2": 2, "nodes4": 4, "before": 1, "after": 1}.items():
        shutil.copytree(recorded, folder / "runs" / name)
        summary = json.loads((recorded / "summary.json").read_text())
        summary |= {
            "num_nodes": num_nodes,
            "world_size": 2 * num_nodes,
            "global_batch": 8 * num_nodes,
        }
        (folder / "runs" / name / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.end_to_end
def test_commands_run_one_after_the_other(checkout: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {
        "PATH": path,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    rule = r"python -m examples\.synthetic_sounds .*|clap-ds (scaling|plot|compare|extrapolate|report|shards (prepare|size)) .*"
    found = commands(rule)
    assert len(found) > 5
    for command in found:
        shell = ["bash", "-c", command]
        done = subprocess.run(
            shell, cwd=checkout, env=os.environ | own, capture_output=True, text=True, timeout=300
        )
        shown = f"$ {command}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, shown
        assert "Traceback" not in shown
    heavy = "ds_configs/htsat_tiny_shards_cpu.json"
    data: Any = load_run(checkout / heavy).clap.data
    assert list(checkout.glob(data.shards)), f"{heavy} finds no shards where README makes them"


@pytest.mark.end_to_end
def test_the_parts_can_be_built_without_a_run() -> None:
    (block,) = (each for each in blocks("python", "docs/training.md") if "ClapEngine" in each)
    losses = processes.run(["-c", block], env=environment(), check=True).stdout.split()[-3:]
    assert len({*map(float, losses)}) == 3


KINDS = ("dog", "chirping_birds", "door_wood_knock")
PROGRAMS = {"deepspeed": "clap_ds.train", "clap-ds": "clap_ds"}
# differences from the page's run; LAION's weights are random numbers of that preset's sizes
TINY = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": False},
    "scheduler": {"params": {"total_num_steps": 2, "warmup_num_steps": 1}},
    "clap": {
        "model": {"preset": "micro"},
        "context_length": 16,
        "data": {"tokenizer": "tokenizer", "num_workers": 0, "shuffle_buffer": 8},
        "train": {"max_samples": 8},
    },
}


def merged(into: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {
        name: merged(into.get(name) or {}, value)
        for name, value in changes.items()
        if isinstance(value, dict)
    }
    return {**into, **changes, **nested}


def typed(command: str, place: Path) -> str:
    """Run a command, with loops over two folds only, and return its output."""
    command = re.sub(r"\bin (1 2|2) [\d ]+;", r"in \1;", command)
    if loop := re.fullmatch(r"for k in ([\d ]+); do (.*); done", command):
        return "".join(typed(loop[2].replace("$k", k), place) for k in loop[1].split())
    program, *words = shlex.split(command)
    if program == "sed":
        return subprocess.run(
            command, shell=True, cwd=place, check=True, text=True, stdout=subprocess.PIPE
        ).stdout
    globbed = [
        sorted(map(str, place.glob(word))) if re.search(r"\?|-checkpoints$", word) else [word]
        for word in words
    ]
    arguments = sum(globbed[program == "deepspeed" :], list[str]())
    return processes.run(
        ["-m", PROGRAMS[program], *arguments], cwd=place, env=environment(), check=True
    ).stdout


@pytest.mark.end_to_end
def test_the_recipe_of_esc50_leads_to_a_score(tmp_path: Path) -> None:
    """Use a small folder in the data set's layout."""
    (root := tmp_path / "ESC-50-master" / "meta").mkdir(parents=True)
    (sounds := tmp_path / "ESC-50-master" / "audio").mkdir()
    lines = ["filename,fold,target,category,esc10,src_file,take"]
    for number in range(30):
        name = f"{1 + number % 5}-{number}-A-{number % 3}.wav"
        kind = number % 3
        lines.append(f"{name},{1 + number % 5},{kind},{KINDS[kind]},{kind == 0},{number},A")
        soundfile.write(
            sounds / name, np.random.default_rng(number).uniform(-0.5, 0.5, 9000), 44100
        )
    (root / "esc50.csv").write_text("\n".join(lines) + "\n")
    train_tokenizer(KINDS, tmp_path / "tokenizer")
    model = ClapModel(load_preset("micro"))
    torch.nn.init.normal_(model.text_projection.linear1.weight)
    checkpoint_of(model, tmp_path / "630k-audioset-best.pt", tokenizer=tmp_path / "tokenizer")
    template = json.loads((ROOT / "ds_configs" / "fine_tune.json").read_text())
    (block,) = (each for each in blocks("json", "docs/recipes.md") if "esc50" in each)
    full = merged(template, json.loads(block))
    (tmp_path / "esc50_1.json").write_text(json.dumps(full))
    run = load_run(tmp_path / "esc50_1.json")
    assert problems_for_training(run.clap, run.deepspeed, 1) == []
    (tmp_path / "esc50_1.json").write_text(json.dumps(merged(full, TINY), indent=2))
    recipe = commands(r"(?!.*(fsd50k|us8k|clap-probe)).*esc50.*", "docs/recipes.md")
    said = {command: typed(command, tmp_path) for command in recipe}
    scores = [text for command, text in said.items() if "clap-ds evaluate" in command]
    assert len(scores) >= 2
    assert all("zero_shot_top1" in text for text in scores), scores
