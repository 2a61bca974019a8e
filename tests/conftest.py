"""Shared fixtures, and settings that make test runs the same on every machine."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Waiting threads leave their core to other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

CLUSTER = "tests/cluster/"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import needs, processes  # noqa: E402
from tests.rank_pool import RankPool  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slowest tests and modules first, so that workers end together."""
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}

    def sort_key(item: pytest.Item) -> tuple[bool, bool, int, Path]:
        needs_no_cluster = not item.nodeid.startswith(CLUSTER)
        is_unit = item.get_closest_marker("end_to_end") is None
        # Large modules take long.
        size = sizes[item.path] if is_unit else 0
        return needs_no_cluster, is_unit, -size, item.path

    items.sort(key=sort_key)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole modules, whose tests share fixtures, to workers, and the only cluster to one
    worker."""
    from xdist.scheduler import LoadScopeScheduling

    # `--dist loadgroup` names groups in a way that pytest 9.2 ignores.
    class Modules(LoadScopeScheduling):
        """Tests by module."""

        def _split_scope(self, nodeid: str) -> str:
            return CLUSTER if nodeid.startswith(CLUSTER) else nodeid.partition("::")[0]

    return Modules(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print skipped tests and the command that installs the missing programs, at the end."""
    reasons = []
    for report in terminalreporter.stats.get("skipped", []):
        # file, line, reason
        if isinstance(report.longrepr, tuple):
            reasons.append(report.longrepr[2].removeprefix("Skipped: "))
    for line in needs.summary(reasons):
        terminalreporter.line(line)


def _pool(world_size: int, **options: Any) -> Any:
    """Make a fixture of processes for the whole test run, by default with a gloo group."""

    @pytest.fixture(scope="session")
    def pool() -> Iterator[RankPool]:
        if options.get("gpu") and world_size > 1:
            import torch

            if torch.cuda.device_count() < world_size:
                pytest.skip(f"needs {world_size} GPUs")
        with contextlib.closing(RankPool(world_size, **options)) as processes:
            yield processes

    return pool


one_rank = _pool(1)
two_ranks = _pool(2)
# processes to join in groups of any size up to this
eight_processes = _pool(8, grouped=False)
one_gpu = _pool(1, gpu=True)
# A process on each GPU; two use NCCL.
two_gpus = _pool(2, gpu=True)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    processes.end_all()


@pytest.fixture(autouse=True, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """In modules that test this project's CPU kernels, use two threads, which share rows and
    columns; with a parameter, use that implementation."""
    if not {"needs_kernels", "each_implementation"} & vars(request.module).keys():
        yield
        return
    # not at the top: most modules need neither
    import torch

    from tests.kernels import compiled_for

    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(2, num_threads))
    with compiled_for(request.param) if hasattr(request, "param") else contextlib.nullcontext():
        yield
    torch.set_num_threads(num_threads)


def micro_run(**changes: Any) -> dict[str, Any]:
    """Return a run of the micro preset that takes seconds; `changes` replace top-level fields,
    `clap` is merged."""
    clap = {
        "model": {"preset": "micro", "drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False},
        "context_length": 16,
        "bench": {"warmup_steps": 1, "windows": 2, "steps_per_window": 2, "breakdown_steps": 1},
    }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.2}},
        **changes,
        "clap": {**clap, **changes.get("clap", {})},
    }


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a micro run's JSON, with output in the test's folder, and return its path."""

    def write(**changes: Any) -> Path:
        run = micro_run(**changes)
        run["clap"].setdefault("output", {"dir": str(tmp_path / "runs")})
        (tmp_path / "run.json").write_text(json.dumps(run))
        return tmp_path / "run.json"

    return write


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a small tokenizer and return its folder."""
    from clap_ds.weights.hub import train_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a loud tone", "a quiet tone", "a long low hum and a click"], directory)
    return str(directory)


@pytest.fixture
def micro() -> Any:
    """Return the micro preset with clips of 480 samples."""
    from clap_ds.config.model import load_preset

    model = load_preset("micro")
    return model.model_copy(update={"audio": model.audio.model_copy(update={"num_samples": 480})})
