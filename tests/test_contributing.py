"""The table "Where is what" in CONTRIBUTING.md lists the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# folders without modules, and links to the folders beside clap_ds/
NO_PACKAGES = {"__pycache__", "launch", "analysis", "ds_configs"}
FOLDERS = {"launch/", "analysis/", "benchmarks/", "examples/"}


def list_architecture() -> set[str]:
    """Return the paths of packages and top-level modules; those of folders end with `/`."""
    package = ROOT / "clap_ds"
    folders = {f"clap_ds/{path.name}/" for path in package.iterdir() if path.is_dir()}
    folders -= {f"clap_ds/{name}/" for name in NO_PACKAGES}
    modules = {f"clap_ds/{path.name}" for path in package.glob("[!_]*.py")}
    return FOLDERS | folders | modules


def read_table() -> list[str]:
    """Return the paths in the first column of the section's table."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Where is what\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    paths = []
    for row in re.findall(r"^\|(.*)\|$", section, re.MULTILINE):
        first_column = row.split("|")[0]
        paths += re.findall(r"`([^`]+)`", first_column)
    return paths


def test_contributing_table_lists_every_package_and_module_once():
    paths = read_table()
    assert len({*paths}) == len(paths)
    missing = list_architecture() - {*paths}
    assert not missing, "add rows for these packages and modules"
    superfluous = [path for path in paths if not (ROOT / path).exists()]
    assert not superfluous, "paths from the root; a folder ends with /"
