"""Package metadata. Exact versions tested together are in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="clap-ds",
    version=re.search(r'__version__ = "(.+)"', (HERE / "clap_ds" / "__init__.py").read_text()).group(1),
    description="Train CLAP (contrastive language–audio pretraining) at scale on DeepSpeed and measure how well it scales",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["clap_ds", "clap_ds.*"]),
    package_data={
        "clap_ds.model": ["presets/*.json"],
        "clap_ds.native": ["*.cpp", "*.h"],
        "clap_ds.analysis": ["published/*.csv"],
        "clap_ds.launch": ["clusters/*.json", "*.sbatch"],
    },
    install_requires=[
        "torch>=2.11,<2.14",
        "torchaudio>=2.11,<2.14",
        "transformers>=5.17,<5.24",
        "deepspeed>=0.19.8,<0.20",
        "pydantic>=2.10",
        "numpy>=1.26",
        "rich>=13",
        "tensorboard>=2.16",
    ],
    extras_require={
        "train": ["webdataset>=1.0", "braceexpand", "fsspec>=2024.6", "soundfile>=0.13", "nvidia-ml-py"],
        "analysis": ["matplotlib>=3.9"],
        "test": [
            "pytest>=8",
            "pytest-xdist[psutil]>=3.6",
            "ruff",
            "mypy",
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
            "clap-train = clap_ds.train:command",
        ]
    },
)
