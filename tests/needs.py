"""Programs, libraries, rights and processors that some tests need beyond Python, make, git and g++; without them
those tests are skipped.

The run's last lines say what was not tested and the one command that installs it. With `CLAP_TEST_EVERYTHING` set, as in CI,
a missing program or right fails the test; a processor can't be installed. `python3 tests/needs.py` prints the Debian packages
that are missing here (standard library only: it runs before anything is installed).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter

PACKAGES = {
    **dict.fromkeys(("slurmctld", "slurmd", "scontrol", "sbatch", "srun"), "slurm-wlm"),
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **{"munged": "munge", "pdsh": "pdsh", "sshd": "openssh-server", "ssh-keygen": "openssh-client"},
    **{"numactl": "numactl", "pkill": "procps", "g++": "g++"},
}
"""Debian's package of each program."""
CLUSTER = tuple(name for name in PACKAGES if name != "g++")
BESIDE = {"slurm-wlm": ("slurm-wlm-basic-plugins",)}
"""Packages that another only recommends."""
EVERYTHING = "CLAP_TEST_EVERYTHING"
PREFIX = "needs "


def where(program: str) -> str | None:
    """Path of a program, also of one that only root's PATH has."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def missing_packages(programs: tuple[str, ...] = tuple(PACKAGES)) -> list[str]:
    """Debian packages of those programs that aren't here."""
    packages = dict.fromkeys(PACKAGES[program] for program in programs if not where(program))
    return [each for package in packages for each in (package, *BESIDE.get(package, ()))]


def programs(*names: str) -> None:
    """Skip the test, or fail it, where one of these isn't installed; as the others here do for what they are named after."""
    if absent := [name for name in names if not where(name)]:
        _do_without(", ".join(absent))


def no_space(path: str) -> None:
    """As DeepSpeed's launcher would hand this path to a shell in pieces."""
    if " " in path:
        _do_without("an environment whose path has no space")


def root(what: str) -> None:
    if os.geteuid() != 0:
        _do_without(f"root: {what}")


def namespaces() -> None:
    """Of networks, processes and mounts."""
    root("hosts are namespaces")
    trial = subprocess.run(["unshare", "-n", "-u", "-m", "-p", "-f", "true"], capture_output=True, text=True)
    if trial.returncode:
        _do_without(f"namespaces: {trial.stderr.strip()}")


def package_index() -> None:
    """One that pip reaches."""
    with tempfile.TemporaryDirectory() as folder:
        probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=15"]
        probe += ["--no-cache-dir", "--dest", folder, "annotated-doc"]
        asked = subprocess.run(probe, capture_output=True, text=True)
    if asked.returncode:
        _do_without(f"a package index: {asked.stderr.strip().splitlines()[-1]}")


def _do_without(what: str) -> None:
    import pytest

    if os.environ.get(EVERYTHING):
        pytest.fail(f"{PREFIX}{what}, and {EVERYTHING} is set", pytrace=False)
    pytest.skip(f"{PREFIX}{what}")


def summary(reasons: list[str]) -> list[str]:
    """What a run's last lines say, given why tests were skipped."""
    counts = Counter(reason for reason in reasons if reason.startswith(PREFIX))
    if not counts:
        return []
    lines = [f"{count} test{'s' if count > 1 else ''} not run: {reason}" for reason, count in counts.items()]
    packages = missing_packages()
    if packages and any(program in reason for reason in counts for program in PACKAGES):
        sudo = "" if os.geteuid() == 0 else "sudo "
        lines.append(f"To run them: {sudo}apt-get install --no-install-recommends {' '.join(packages)}")
    return lines


if __name__ == "__main__":
    print(" ".join(missing_packages()))
