"""Scripts for sites of several kinds, and submission that is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.batch_script import Request, finishing, log_file, script
from clap_ds.launch.sites import load_site
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]


def _site(tmp_path: Path, **fields: object) -> str:
    (tmp_path / "site.json").write_text(json.dumps(fields))
    return str(tmp_path / "site.json")


@pytest.mark.parametrize(
    ("train", "limit", "warning"),
    [(False, "00:15:00", 60), (False, "2", 60), (False, "1:30", 60), (False, "00:01:00", 30),
     (True, "1-00:00:00", 300), (True, "10", 300), (True, "10:30", 300), (True, "00:09:00", 270)],
)  # fmt: skip
def test_warning_is_never_more_than_half_the_limit(tmp_path: Path, train: bool, limit: str, warning: int) -> None:
    site = load_site(_site(tmp_path, sbatch=["--exclusive"]))
    request = Request("site", 4, None, train=train, time=limit)
    assert request.warning_s(site, 1) == warning
    assert bool(request.notes(site, 1)) == (warning < (300 if train else 60))


def test_paths_with_spaces_quotes_and_percents(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("it's 50%", "b c")]
    request = Request(_site(tmp_path), 4, None)
    text = script(request, 1, "name", log_file(folders[0], "slurm-%j.out"), folders)
    assert f'#SBATCH --output="{tmp_path}/it\'s 50%%/slurm-%j.out"' in text
    shown = text.partition("exec bash")[0] + 'echo "$folder"\n'
    for task, folder in enumerate(folders):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}
        told = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True, env=environment)
        assert told.stdout == f"{folder}\n"
    with pytest.raises(UserError, match="no backslash"):
        script(request, 1, "name", "a\\b", folders)


def test_interrupted_while_sbatch_answers(tmp_path: Path, slurm: FakeSlurm) -> None:
    """Ctrl-C in a terminal goes to the command and to what it started: the job's id is on record all the same."""
    slurm.write("sbatch", "#!/bin/bash\ntouch asked\nuntil [ -e answer ]; do sleep 0.05; done\necho 7\n")
    program = """
from pathlib import Path
from clap_ds.config.errors import exit_code_of
from clap_ds.launch.batch_script import finishing
from clap_ds.launch.slurm import submit
def act():
    with finishing():
        Path("id").write_text(submit(Path("script"), "name"))
    print("not here")
raise SystemExit(exit_code_of(act))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (tmp_path / "asked").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "answer").touch()
    out, err = process.communicate(timeout=180)
    assert (process.returncode, out) == (130, "")
    assert "error: interrupted" in err
    assert (tmp_path / "id").read_text() == "7"


def test_a_second_interrupt_ends_the_wait() -> None:
    def interrupt_twice() -> None:
        with finishing():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("still waiting")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert signal.getsignal(signal.SIGINT) is before
