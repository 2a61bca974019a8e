"""Test compiling, caching and opening the library of CPU kernels with a trivial source, on any
processor."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clap_ds.cpu_kernels import jit_build
from tests import needs

SOURCE = "int number = 0;\n"
WORKING_COMPILER = 'echo "$@" >> "$0.calls"; exec g++ "$@"'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only source, which replaces the kernels'."""
    needs.programs("g++")
    path = tmp_path / "only.cpp"
    path.write_text(SOURCE)
    monkeypatch.setattr(jit_build, "SOURCES", tmp_path)
    monkeypatch.setattr(jit_build, "FLAGS", ("-O0", "-shared", "-fPIC"))
    monkeypatch.setattr(
        jit_build, "IMPLEMENTATIONS", {"any": jit_build.Implementation(frozenset(), ())}
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return path


def use_compiler(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the compiler by a shell script; a working one logs its calls to a file next to it."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def problem() -> str:
    """Return why there is no library; empty if there is one."""
    library = jit_build._load.__wrapped__()
    return library if isinstance(library, str) else ""


def test_library_is_compiled_once_for_each_version_of_sources(
    source, tmp_path, monkeypatch, capsys
):
    use_compiler("sleep 0.1; " + WORKING_COMPILER, tmp_path, monkeypatch)
    calls = tmp_path / "compiler.calls"
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(problem) for _ in range(4)]
    assert [future.result() for future in futures] == [""] * 4
    assert "compiling" in capsys.readouterr().err
    assert not problem()
    assert not capsys.readouterr().err
    assert calls.read_text().count(" -o ") == 1
    source.write_text(SOURCE + "// changed\n")
    assert not problem()
    assert calls.read_text().count(" -o ") == 2
    assert len([*tmp_path.glob("cache/clap_ds/cpu_kernels/*.so")]) == 2


@pytest.mark.parametrize("name", jit_build.IMPLEMENTATIONS)
def test_kernels_of_every_implementation_compile(monkeypatch, name):
    """Once per machine, because the result is stored in the runs' cache."""
    monkeypatch.delenv("CXX", raising=False)
    flags = *jit_build.FLAGS, *jit_build.IMPLEMENTATIONS[name].flags
    targets = [*(flag for flag in flags if flag.startswith("-m")), "-E", "-x", "c++", os.devnull]
    if not shutil.which("g++") or subprocess.run(["g++", *targets], capture_output=True).returncode:
        pytest.skip("needs a g++ that can target AMX (x86, GCC 11 or later)")
    library = jit_build._build(flags).read_bytes()
    modules = "".join(path.read_text() for path in jit_build.SOURCES.parent.glob("*.py"))
    names = set(re.findall(r'"(clap_(?!ds")\w+)"', modules))
    assert len(names) == 13
    assert not [name for name in names if f"\0{name}\0".encode() not in library]


@pytest.mark.parametrize(
    ("script", "environment", "expected"),
    [
        ("exit 3", {}, "exit status 3"),
        (WORKING_COMPILER, {"CXX": "/no/such/compiler -O2"}, "no C.. compiler"),
    ],
)
def test_missing_library_has_reason(
    source, tmp_path, monkeypatch,
    script, environment, expected
):  # fmt: skip
    use_compiler(script, tmp_path, monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.search(expected, problem())
