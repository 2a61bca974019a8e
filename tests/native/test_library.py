"""Compiling, keeping and opening the library of CPU kernels, with a source that takes no time, on any processor."""

import fcntl
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from clap_ds.native import library
from tests import needs

SOURCE = "int number = 0;\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only source, in place of the kernels'."""
    needs.programs("g++")
    path = tmp_path / "only.cpp"
    path.write_text(SOURCE)
    monkeypatch.setattr(library, "HERE", tmp_path)
    monkeypatch.setattr(library, "FLAGS", ("-O0", "-shared", "-fPIC"))
    monkeypatch.setattr(library, "IMPLEMENTATIONS", {"any": library.Implementation(frozenset(), ())})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return path


def problem() -> str:
    """Why there is no library; empty where there is one."""
    found = library._load.__wrapped__()
    return found if isinstance(found, str) else ""


def kept() -> Path:
    (path,) = library.cache_directory().glob("*.so")
    return path


def use_compiler(folder: Path, patch: pytest.MonkeyPatch, script: str) -> None:
    """Has a shell script stand for the compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    patch.setenv("CXX", str(path))


def test_compiled_once_while_others_wait_and_again_for_other_sources(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(tmp_path, monkeypatch, 'sleep 0.1; echo "$@" >> "$0.calls"; exec g++ "$@"')
    with ThreadPoolExecutor(4) as pool:
        assert [each.result() for each in [pool.submit(problem) for _ in range(4)]] == [""] * 4
    source.write_text(SOURCE + "// changed\n")
    assert not problem()
    assert not problem()
    calls = (tmp_path / "compiler.calls").read_text().splitlines()
    assert sum(" -o " in line for line in calls) == 2


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        ("no-such-compiler", "no C++ compiler"),
        ("/no/such/compiler -O2", "no C++ compiler"),
        ("'g++", "No closing quotation"),
        ("env g++ -DWANTED=0", ""),
        ("g++", "WANTED"),  # its first error
        ("#exit 3", "exit status 3"),
        ("#kill -9 $$", "exit status -9"),
        ('#case "$*" in *-o*) sleep 3 & wait;; esac', "timed out"),
    ],
)
def test_compilers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, expected: str) -> None:
    source.write_text(SOURCE.replace("0", "WANTED"))
    monkeypatch.setattr(library, "COMPILE_TIMEOUT_S", 0.5 if expected == "timed out" else 60)
    monkeypatch.setenv("CXX", compiler)
    if compiler.startswith("#"):
        use_compiler(tmp_path, monkeypatch, compiler[1:])
    assert expected in problem()
    assert bool(problem()) == bool(expected)
    assert bool([*library.cache_directory().glob("*.so")]) == (not expected)


def test_an_operating_system_that_refuses_tiles(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "IMPLEMENTATIONS", {"AMX": library.Implementation(frozenset(), ())})
    for answer, expected in ((-1, "use AMX"), (0, "")):
        libc = Mock(syscall=Mock(return_value=answer))
        monkeypatch.setattr(library.ctypes, "CDLL", lambda path, libc=libc: libc if path is None else Mock())
        assert expected in problem()
        assert [number.value for number in libc.syscall.call_args.args] == [158, 0x1023, 18]


def test_locks_that_nobody_holds_that_are_held_and_that_there_are_not(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert not problem()
        lock = kept().with_suffix(".lock")
        kept().unlink()
    with monkeypatch.context() as patch, lock.open() as holder:
        patch.setattr(library, "COMPILE_TIMEOUT_S", 0.5)
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert str(lock) in problem()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks available")))
    assert not problem()


def test_damaged_library_is_compiled_again(source: Path) -> None:
    path = library._build(library.FLAGS)
    whole = path.read_bytes()
    for damaged in (b"", whole[:5000], whole[:-100] + bytes(100)):
        path.unlink()  # what is open stays as it is
        path.write_bytes(damaged)
        assert not problem()
        assert kept().read_bytes() == whole


def test_cache_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (str(source), "/proc/nowhere"):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert f"{folder}/clap_ds ($XDG_CACHE_HOME)" in problem()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert "home directory" in problem()


@pytest.mark.parametrize("name", library.IMPLEMENTATIONS)
def test_the_kernels_compile_whether_or_not_they_can_run_here(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Once a machine: what is made is kept where a run looks for it."""
    monkeypatch.delenv("CXX", raising=False)
    flags = *library.FLAGS, *library.IMPLEMENTATIONS[name].flags
    targets = [*(flag for flag in flags if flag.startswith("-m")), "-E", "-x", "c++", os.devnull]
    if not shutil.which("g++") or subprocess.run(["g++", *targets], capture_output=True).returncode:
        pytest.skip("needs a g++ that can target AMX (x86, GCC 11 or later)")
    made = library._build(flags).read_bytes()
    modules = "".join(path.read_text() for path in library.HERE.glob("*.py"))
    names = set(re.findall(r'"(clap_(?!ds")\w+)"', modules))
    assert len(names) == 13
    assert not [name for name in names if f"\0{name}\0".encode() not in made]


def test_the_quickest_implementation_that_a_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    skylake = "avx512f avx512bw avx512dq avx512vl"
    expected: list[str] = []
    for features, first in (
        ("", []),
        (skylake, ["AVX-512 without bf16"]),
        (f"{skylake} avx512_bf16", ["AVX-512"]),
        (f"{skylake} avx512_bf16 amx_tile amx_bf16", ["AMX"]),
    ):
        monkeypatch.setattr(library, "_processor", lambda features=features: f"flags : {features}")
        expected = first + expected
        assert library.executable() == expected
        assert expected or "no AVX-512" in problem()
