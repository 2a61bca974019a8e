"""README and docs/: their commands run verbatim if possible, and the names they use exist."""

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
import pytest

from clap_ds.config.arguments import with_field
from clap_ds.config.reference import reference
from clap_ds.config.settings import load_run
from clap_ds.launch.cluster_profile import load_profile
from clap_ds.training.plan import problems_for_training
from clap_ds.utils.files import flatten
from tests import processes
from tests.training.training_commands import ROOT, environment

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
# pages whose JSON blocks are cluster profiles, and parts of a configuration
PROFILES = ("docs/cluster_profile.md", "docs/infiniband_nccl.md", "docs/installation.md")
PARTS = ("docs/recipes.md",)
# tests/cluster/test_walkthrough.py runs this section on a cluster.
WALKTHROUGH = re.compile(r"^## From clone to scaling plot\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def find_blocks(language: str, *pages: str) -> list[str]:
    """Return the code blocks of pages, by default of all."""
    text = "\n".join(PAGES[page] for page in pages or PAGES)
    text = WALKTHROUGH.sub("", text)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def find_commands(pattern: str, *pages: str) -> list[str]:
    """Return the different commands that match a pattern, without comments at their ends."""
    commands = {}
    for block in find_blocks("console", *pages):
        for line in block.splitlines():
            command = re.split(r"\s{2,}#", line.removeprefix("$ "))[0].strip()
            if re.fullmatch(pattern, command) and "…" not in command:
                commands[command] = None
    return [*commands]


MAIN_COMMANDS = {
    "deepspeed --hostfile H clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json",
    "clap-ds flops --deepspeed_config ds_configs/htsat_tiny.json --context_length 514",
    "clap-ds scaling analysis/published/jupiter_htsat_tiny.csv",
    "clap-ds plot analysis/published/jupiter_htsat_{tiny,base}.csv --output scaling.png",
}


def read_outputs() -> dict[str, list[str]]:
    """Return the lines that README shows below each command of its first section."""
    first_section = PAGES["README.md"].split("\n## ")[1]
    outputs = {}
    for block in re.findall(r"^```console\n(.*?)^```", first_section, re.MULTILINE | re.DOTALL):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = text.splitlines()
            outputs[re.split(r"\s{2,}#", command)[0]] = [line.strip() for line in lines]
    return outputs


def read_archived(record: str, pattern: str) -> str:
    """Return the text of the file in an H200 record's archive whose path matches a pattern."""
    with tarfile.open(ROOT / "results" / "h200" / f"{record}.tar.xz") as archive:
        (name,) = (name for name in archive.getnames() if re.fullmatch(pattern, name))
        file = archive.extractfile(name)
        assert file is not None
        return file.read().decode()


def test_readme_first_section_has_the_main_commands():
    assert read_outputs().keys() == MAIN_COMMANDS


def test_readme_benchmark_output_is_in_its_record():
    (output,) = (
        lines for command, lines in read_outputs().items() if command.startswith("deepspeed")
    )
    log = read_archived("step", r"step/bench\.log").replace("│", " ")
    logged_lines = {" ".join(line.split()) for line in log.splitlines()}
    assert len(output) > 3
    assert {" ".join(line.split()) for line in output} <= logged_lines


# archived run of each row of README's results on a GPU → its archive in results/h200
RECORDED_RUNS = {"call1/compile_off": "call1", "call1/htsat_tiny": "call1", "step": "step"}


def test_readme_results_on_a_gpu_equal_their_records():
    rows = re.findall(r"^\| \w{8} \(\[record\].+", PAGES["README.md"], re.MULTILINE)
    for row, (folder, record) in zip(rows, RECORDED_RUNS.items(), strict=True):
        assert f"(results/h200/{record}.md)" in row
        summary = json.loads(read_archived(record, rf"{folder}/(run-\w+/)?summary\.json"))
        assert (" not compiled " in row) == ("compiled" not in summary)
        rates = summary["samples_per_s_per_gpu"]
        assert [cell.strip() for cell in row.split("|")[3:-1]] == [
            f"{rates['mean']:,.0f}",
            f"{sum(rates['window_s']):.1f} s",
            f"{1000 * summary['step_time_s']['median']:.0f} ms",
            f"{summary['memory_peak_bytes'] / 2**30:.1f} GiB",
            f"{summary['achieved_tflops']:.0f} ({summary['mfu_model_percent']:.1f}%)",
        ]


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["flops", "scaling", "plot"])
def test_readme_command_prints_the_lines_below_it(name, tmp_path):
    ((command, output),) = (
        item for item in read_outputs().items() if item[0].startswith(f"clap-ds {name}")
    )
    picture = tmp_path / "scaling.png"
    # The shell expands braces.
    echo = "printf '%s\n' " + command.replace("scaling.png", f"'{picture}'")
    expanded = subprocess.check_output(["bash", "-c", echo], cwd=ROOT, text=True)
    argv = ["-m", "clap_ds", *expanded.splitlines()[1:]]
    printed = processes.run(argv, cwd=ROOT, env=environment(), check=True).stdout
    assert {*output} <= {line.strip() for line in printed.splitlines()}
    assert picture.exists() == (name == "plot")


@pytest.mark.parametrize("page", PAGES)
def test_page_links_lead_to_existing_files(page):
    links = re.findall(r"\]\(([^)#:]+)\)", PAGES[page])
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_pages_name_existing_fields():
    fields = set()
    for section, table in re.findall(r"^## `([\w.]+)`.*\n([^#]*)", reference(), re.MULTILINE):
        names = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
        fields |= {section, *(f"{section}.{name}" for name in names)}
    for page, text in PAGES.items():
        # where `clap` is a loaded model
        if page != "docs/inference.md":
            assert {*re.findall(r"`(clap(?:\.[a-z]\w*)+)", text)} <= fields, page


@pytest.mark.parametrize("page", PAGES)
def test_page_configurations_are_valid(page, tmp_path, monkeypatch):
    # as if the package for s3:// were installed
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: None)
    if page in PARTS:
        return
    file = tmp_path / "content.json"
    for block in find_blocks("json", page):
        file.write_text(block)
        if page in PROFILES:
            load_profile(str(file))
        else:
            load_run(file)


def test_page_commands_that_are_not_run_here_name_existing_files():
    scripts = r"clap_ds/(bench|train)\.py --deepspeed_config ds_configs/\S+"
    commands = find_commands(rf"(deepspeed|torchrun|python) .*{scripts}")
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert (Path(sys.executable).parent / program).exists()
        script = next(argument for argument in arguments if argument.endswith(".py"))
        assert (ROOT / script).exists()
        run = load_run(ROOT / arguments[arguments.index("--deepspeed_config") + 1])
        if script.endswith("train.py"):
            assert problems_for_training(run.clap, run.deepspeed) == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the checkout as cloned, and add the runs that README analyzes."""
    folder = tmp_path / "clap-ds"
    excluded = shutil.ignore_patterns(".*", "runs", "wheelhouse", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=excluded)
    record = ROOT / "tests" / "analysis" / "data" / "record_2ranks"
    summary = json.loads((record / "summary.json").read_text())
    for name, num_nodes in {"nodes1": 1, "nodes2": 2, "nodes4": 4, "before": 1, "after": 1}.items():
        shutil.copytree(record, folder / "runs" / name)
        scale = {
            "num_nodes": num_nodes,
            "world_size": 2 * num_nodes,
            "global_batch": 8 * num_nodes,
        }
        (folder / "runs" / name / "summary.json").write_text(json.dumps(summary | scale))
    return folder


@pytest.mark.end_to_end
def test_page_commands_run_one_after_the_other(checkout):
    names = r"scaling|plot|compare|extrapolate|report|shards (prepare|size)"
    commands = find_commands(rf"python -m examples\.synthetic_sounds .*|clap-ds ({names}) .*")
    assert len(commands) > 5
    env = environment(
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=str(checkout),
    )
    for command in commands:
        shell = ["bash", "-c", command]
        done = subprocess.run(
            shell, cwd=checkout, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
    # The sounds are where the configuration for them expects shards.
    data: Any = load_run(checkout / "ds_configs/htsat_tiny_shards_cpu.json").clap.data
    assert [*checkout.glob(data.shards)]


@pytest.mark.end_to_end
def test_training_page_example_builds_parts_without_a_run():
    (program,) = (
        block for block in find_blocks("python", "docs/training.md") if "ClapEngine" in block
    )
    output = processes.run(["-c", program], env=environment(), check=True).stdout
    losses = [float(loss) for loss in output.split()[-3:]]
    assert len({*losses}) == 3


def test_recipe_changes_of_the_template_are_valid(tmp_path):
    for block in find_blocks("json", *PARTS):
        content = json.loads((ROOT / "ds_configs" / "fine_tune.json").read_text())
        for name, value in flatten(json.loads(block)).items():
            content = with_field(content, name, value)
        (tmp_path / "run.json").write_text(json.dumps(content))
        run = load_run(tmp_path / "run.json")
        assert problems_for_training(run.clap, run.deepspeed, 1) == []
