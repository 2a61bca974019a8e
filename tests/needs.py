"""Skip tests that need programs or rights that aren't available.

The last lines of a run list what was skipped and the command that installs it. With
`CLAP_TEST_EVERYTHING` set, as in CI, a missing program or right fails the test. `python3
tests/needs.py` prints the missing Debian packages (standard library only: it runs before anything
is installed).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections import Counter

# program → its Debian package
PACKAGES = {
    **dict.fromkeys(("slurmctld", "slurmd", "scontrol", "sbatch", "srun"), "slurm-wlm"),
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    "munged": "munge",
    "pdsh": "pdsh",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "numactl": "numactl",
    "pkill": "procps",
    "g++": "g++",
}
CLUSTER = tuple(name for name in PACKAGES if name != "g++")
# which slurm-wlm only recommends
SLURM_PLUGINS = "slurm-wlm-basic-plugins"
EVERYTHING = "CLAP_TEST_EVERYTHING"
PREFIX = "needs "


def where(program: str) -> str | None:
    """Return a program's path, also if only root's PATH has it."""
    return shutil.which(
        program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    )


def missing_packages(programs: tuple[str, ...] = tuple(PACKAGES)) -> list[str]:
    """Return the Debian packages of missing programs."""
    packages = dict.fromkeys(PACKAGES[program] for program in programs if not where(program))
    if "slurm-wlm" in packages:
        packages[SLURM_PLUGINS] = None
    return [*packages]


def programs(*names: str) -> None:
    """Skip or fail the test if one of these isn't installed; other functions here do so for what
    they are named after."""
    missing = [name for name in names if not where(name)]
    if missing:
        _skip_or_fail(", ".join(missing))


def package(name: str, extra: str) -> None:
    if importlib.util.find_spec(name) is None:
        _skip_or_fail(f"{name}: pip install 'clap-ds[{extra}]'")


def namespaces() -> None:
    """Require root and namespaces of networks, processes and mounts."""
    if os.geteuid() != 0:
        _skip_or_fail("root: hosts are namespaces")
    command = ["unshare", "-n", "-u", "-m", "-p", "-f", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        _skip_or_fail(f"namespaces: {done.stderr.strip()}")


def _skip_or_fail(requirement: str) -> None:
    # not at the top: this file also runs before anything is installed
    import pytest

    if os.environ.get(EVERYTHING):
        pytest.fail(f"{PREFIX}{requirement}, and {EVERYTHING} is set", pytrace=False)
    pytest.skip(f"{PREFIX}{requirement}")


def summary(reasons: list[str]) -> list[str]:
    """Return a run's last lines, given the reasons of skipped tests."""
    counts = Counter(reason for reason in reasons if reason.startswith(PREFIX))
    if not counts:
        return []
    lines = []
    for reason, count in counts.items():
        lines.append(f"{count} test{'s' if count > 1 else ''} not run: {reason}")
    packages = " ".join(missing_packages())
    reasons_text = " ".join(counts)
    if packages and any(program in reasons_text for program in PACKAGES):
        sudo = "" if os.geteuid() == 0 else "sudo "
        lines.append(f"To run them: {sudo}apt-get install --no-install-recommends {packages}")
    return lines


if __name__ == "__main__":
    print(" ".join(missing_packages()))
