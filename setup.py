"""What pyproject.toml can't say: a wheel and a source archive know the commit they were built from."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PLACES = runpy.run_path(str(Path(__file__).parent / "clap_ds" / "config" / "places.py"))
COMMIT = PLACES["commit"]()  # before building puts files beside the sources


def record_commit(folder: Path) -> None:
    """Write down what `places.commit` reads where there is no checkout."""
    path = folder / "clap_ds" / PLACES["COMMIT_FILE"]
    path.unlink(missing_ok=True)
    if COMMIT:
        path.write_text(COMMIT + "\n")


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            record_commit(Path(self.build_lib))


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
