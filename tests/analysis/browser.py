"""Chromium, to see whether a page really renders."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests import needs


def chromium() -> str:
    """Path of the browser, without which the test is skipped."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        needs.programs("chromium")
    return found or "chromium"


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
