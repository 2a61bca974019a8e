"""Chromium, to see whether a page really renders."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def chromium() -> str:
    """Path of the browser. Where it must be there (CI, or as root in a container) its absence fails the test."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    message = "no Chromium: install the Debian package chromium"
    if os.environ.get("CI") == "true" or os.geteuid() == 0:
        pytest.fail(message)
    pytest.skip(message)


def rendered(page: Path, profile: Path, *options: str) -> str:
    """The page's elements after its scripts ran, as HTML."""
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--window-size=1200,4000", "--virtual-time-budget=2000", *options, "--dump-dom",
        page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
