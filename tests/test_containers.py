"""The recipes of docs/containers/ make the same image, of what the wheel needs, with the versions of constraints.txt."""

import re

from tests.test_wheel import FILES, FOLDERS, ROOT

FOLDER = ROOT / "docs" / "containers"


def test_both_recipes_install_the_same_by_constraints() -> None:
    docker, apptainer = (
        re.sub(r"^#.*\n", "", (FOLDER / name).read_text(), flags=re.MULTILINE).replace("\\\n", "")
        for name in ("Dockerfile", "clap.def")
    )
    lines = [re.sub(r"\s+", " ", line) for line in docker.splitlines()]
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", apptainer, re.DOTALL | re.MULTILINE))
    (base,) = (line.removeprefix("FROM ") for line in lines if line.startswith("FROM "))
    assert f"Bootstrap: docker\nFrom: {base}\n" in apptainer
    copied = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    sources = {name for *names, _ in copied for name in names}
    assert sources == {"constraints.txt", *FOLDERS, *FILES} - {".gitignore"}  # tests/test_wheel.py installs from these
    assert all(place in ("./", *names) for *names, place in copied)
    assert dict(map(str.split, sections["files"].split("\n")[:-2])) == {
        name: f"/opt/clap-ds/{name}" for name in sources
    }
    commands = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    typed = [re.sub(r"\s+", " ", line).strip() for line in sections["post"].splitlines()]
    assert [line for line in typed if line and line != "cd /opt/clap-ds"] == commands
    installs = re.findall(r"pip install [^&]*", " ".join(commands))
    assert len(installs) == 2
    assert all(" -c constraints.txt " in line and "==" not in line for line in installs)
