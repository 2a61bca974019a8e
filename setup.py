"""What pyproject.toml can't say: a wheel knows the commit it was built from."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PATHS = runpy.run_path(str(Path(__file__).parent / "clap_ds" / "utils" / "paths.py"))
COMMIT = PATHS["commit"]()  # before building puts files beside the sources


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            path = Path(self.build_lib) / "clap_ds" / PATHS["COMMIT_FILE"]
            path.unlink(missing_ok=True)
            if COMMIT:
                path.write_text(COMMIT + "\n")


setup(cmdclass={"build_py": BuildPy})
