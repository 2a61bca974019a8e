"""Package metadata. Exact versions tested together are in constraints.txt, the tools' settings in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
PLACES = runpy.run_path(str(HERE / "clap_ds" / "config" / "places.py"))
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


setup(
    name="clap-ds",
    version=PLACES["VERSION"],
    description="Train CLAP (contrastive language–audio pretraining) at scale on DeepSpeed and measure how well it scales",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The clap-ds contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["CLAP", "contrastive learning", "audio", "DeepSpeed", "benchmark", "SLURM"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Multimedia :: Sound/Audio :: Analysis",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Benchmark",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["clap_ds", "clap_ds.*"]),
    package_data={
        "clap_ds": ["py.typed", "ds_configs/*.json"],
        "clap_ds.config": ["presets/*.json"],
        "clap_ds.native": ["*.cpp", "*.h"],
        "clap_ds.analysis": ["published/*.csv"],
        "clap_ds.launch": ["clusters/*.json", "*.sbatch"],
    },
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
    install_requires=[
        "torch>=2.11,<2.14",
        "torchaudio>=2.11,<2.14",
        "transformers>=5.17,<5.24",
        "huggingface_hub",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "deepspeed>=0.19.8,<0.20",
        "pydantic>=2.10",
        "numpy>=1.26",
        "psutil>=5.9",
        "rich>=13",
        "tensorboard>=2.16",
        "tqdm>=4.66",
    ],
    extras_require={
        "train": [
            "webdataset>=1.0",
            "braceexpand",
            "fsspec>=2024.6",
            "soundfile>=0.13",
            "miniaudio>=1.61; platform_machine == 'x86_64'",  # FLAC in two thirds of the time; elsewhere it has no wheels
            "nvidia-ml-py",
            "pandas>=2.2",
        ],
        "s3": ["s3fs>=2024.6"],
        "gcs": ["gcsfs>=2024.6"],
        "analysis": ["matplotlib>=3.9", "markdown-it-py>=3", "pandas>=2.2"],
        "test": [
            "pytest>=9",
            "pytest-xdist[psutil]>=3.6",
            "ruff",
            "mypy",
            "import-linter",
            "hypothesis",
            "scikit-learn",
            "triton; platform_system == 'Linux'",
        ],
    },
    entry_points={
        "console_scripts": [
            "clap-bench = clap_ds.bench:command",
            "clap-evaluate = clap_ds.evaluate:command",
            "clap-flops = clap_ds.flops:command",
            "clap-plan = clap_ds.plan:command",
            "clap-shards = clap_ds.shards:command",
            "clap-train = clap_ds.train:command",
            "clap-hostfile = clap_ds.launch.hostfile:main",
            "clap-sites = clap_ds.launch.sites:main",
            "clap-preflight = clap_ds.launch.preflight:main",
            "clap-submit = clap_ds.launch.submit:main",
            "clap-sweep = clap_ds.launch.sweep:main",
            *(
                f"clap-{name} = clap_ds.analysis.{name}:command"
                for name in ("compare", "cost", "efficiency", "project", "report")
            ),
        ]
    },
)
