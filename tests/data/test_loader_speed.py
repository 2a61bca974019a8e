import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clap_ds import shards
from clap_ds.config.errors import exit_code_of
from clap_ds.data import file_speed
from clap_ds.data.loader_speed import FileSpeed, Speed, files_verdict, verdict, workers_needed
from tests.data.tars import marked_item, marked_tars, put

SPEEDS = [Speed(1, 100.0, 10.0), Speed(2, 190.0, 19.0), Speed(4, 320.0, 32.0)]


@pytest.mark.parametrize(
    ("needed", "workers"), [(10, 1), (80, 1), (81, 2), (152, 2), (250, 4), (256, 4), (257, 5), (640, 10)]
)
def test_workers_needed(needed: float, workers: int) -> None:
    """A quarter more than the step needs; beyond 4 workers, 80 samples/s each."""
    assert workers_needed(SPEEDS, needed) == workers
    assert f" {workers} worker(s) per rank" in verdict(SPEEDS, needed=needed, ranks_per_host=1, cores=8)


def test_verdict_says_whether_the_cores_suffice() -> None:
    text = verdict(SPEEDS, needed=150, ranks_per_host=4, cores=12)
    assert "takes 2 worker(s) per rank" in text
    assert "\n8 worker(s) beside 4 training process(es) on this host's 12 cores: enough" in text
    assert "NOT enough" in verdict(SPEEDS, needed=150, ranks_per_host=4, cores=11)
    assert "takes about 10 worker(s)" in verdict(SPEEDS, needed=640, ranks_per_host=1, cores=11)


@pytest.mark.parametrize(("needed", "enough"), [(999, "enough"), (1001, "NOT enough")])
def test_files_verdict(needed: float, enough: str) -> None:
    """Two ranks need twice as much; the most that the file system gave counts, 2,000 MB/s."""
    files = [FileSpeed(1, 1500.0, 9000.0), FileSpeed(2, 2000.0, 9000.0), FileSpeed(4, 1900.0, 9000.0)]
    text = files_verdict(files, needed=needed, ranks_per_host=2, item_bytes=1e6)
    assert text.endswith(f"it gave 2,000 MB/s to 2 reader(s): {enough}")


def measure(*words: object) -> int:
    return exit_code_of(lambda: shards.main(["measure", *map(str, words)]))


@pytest.fixture
def run_json(tmp_path: Path, tokenizer_dir: str, write_run: Callable[..., Path]) -> Path:
    data = {"source": "shards", "shards": marked_tars(tmp_path, 2, 8), "tokenizer": tokenizer_dir}
    return write_run(clap={"data": data})


def test_measures_more_and_more_workers(tmp_path: Path, run_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"samples_per_s_per_gpu": {"median": 0.5}}))
    words = ["--deepspeed_config", run_json, "--seconds", 0.3, "--max_workers", 3, "--run_directory", tmp_path]
    assert measure(*words) == 0
    printed = capsys.readouterr().out
    assert [int(workers) for workers in re.findall(r"^ +(\d)(?: +[\d.]+){7}$", printed, re.MULTILINE)] == [1, 2, 3]
    assert re.search(r"cores a GPU, with a margin of 25%: [\d,]+ at 624, [\d,]+ at 3,300, [\d,]+ at 4,500", printed)
    assert "the step needs 0.5 samples/s per rank; with a margin of 25% that takes 1 worker(s) per rank" in printed
    assert re.search(r"they need 0\.\d+ MB/s of the file system; cold, .*: enough", printed)


def test_tars_can_be_named_without_a_run(
    tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tars = marked_tars(tmp_path / "sounds", 2, 8)
    (tmp_path / "sounds" / "tokenizer").symlink_to(tokenizer_dir)
    words = ["--preset", "micro", "--micro_batch", 4, "--seconds", 0.5, "--max_workers", 1, "--json"]
    assert measure(tars, *words) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    (speed,), (files,) = figures["speeds"], figures["files"]
    encoded_bytes = len(dict(marked_item(0))["0000.wav"])
    assert speed["mb_per_s"] == pytest.approx(speed["samples_per_s"] * encoded_bytes / 1e6, rel=0.5)
    assert files["num_readers"] == 1
    assert files["cold_mb_per_s"] > 0 < files["warm_mb_per_s"]
    size = sum(path.stat().st_size for path in (tmp_path / "sounds").glob("*.tar"))
    assert figures["bytes_per_item"] == size / 16
    assert set(figures["cores_per_gpu"]) == {"624", "3300", "4500"}
    assert "workers  samples/s" in printed.err


def test_prepared_shards_say_for_which_model(
    tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tars = marked_tars(tmp_path / "sounds", 1, 8)
    (tmp_path / "sounds" / "tokenizer").symlink_to(tokenizer_dir)
    prepare = ["prepare", tars, str(tmp_path / "mel"), "--kind", "mel", "--preset", "micro"]
    assert exit_code_of(lambda: shards.main(prepare)) == 0
    words = [f"{tmp_path}/mel/*.tar", "--micro_batch", 4, "--seconds", 0.2, "--max_workers", 1]
    assert measure(*words) == 0
    assert measure(*words, "--preset", "demo") == 2
    assert (
        "mel_bins is 16 in the shards, 64 in the model, fmax is 14000 in the shards, 8000 in the model; it fits preset micro"
        in (capsys.readouterr().err)
    )


def test_remote_tars_without_a_manifest(tmp_path: Path, tokenizer_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    marked_tars(tmp_path, 2, 8)
    tars = [put(f"memory://measured/{path.name}", path.read_bytes()) for path in sorted(tmp_path.glob("*.tar"))]
    words = ["--tokenizer", tokenizer_dir, "--preset", "micro", "--micro_batch", 4]
    assert measure(*tars, *words, "--seconds", 0.3, "--max_workers", 1, "--needed_samples_per_s", 0.1) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +1( +[\d.]+){5} +– +–$", printed, re.MULTILINE)
    assert "remote files: cold is what streams" in printed


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"data": {"source": "synthetic"}}, [], "clap.data.source: expected shards, found synthetic"),
        ({"data": {"source": "shards", "shards": "nowhere.tar", "tokenizer": "x"}}, [], "shards: 1 of the 1 files"),
        ({}, ["--run_directory", "nowhere"], "no such file"),
        ({}, ["more.tar"], "expected tars, or --deepspeed_config"),
        ({}, ["--preset", "micro"], "--preset: --deepspeed_config says that"),
    ],
)
def test_what_cannot_be_measured(
    write_run: Callable[..., Path], run_json: Path, capsys: pytest.CaptureFixture[str],
    changes: dict[str, object], words: list[str], message: str,
) -> None:  # fmt: skip
    path = write_run(clap=changes) if changes else run_json
    assert measure("--deepspeed_config", path, *words) == 2
    assert message.lower() in capsys.readouterr().err.lower()


def test_files_are_dropped_from_memory_and_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(3 * 2**20))
    whole, half = file_speed.Part(str(path), 2**40), file_speed.Part(str(path), 3 * 2**19)
    dropped = file_speed.drop([whole])
    if dropped is None:
        pytest.skip("this file system doesn't tell what of it is in memory")
    assert dropped
    rate, done = file_speed.read([whole, half], 2, 10)
    assert [part.size for part in done] == [3 * 2**20, 3 * 2**19]
    assert rate > 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0  # maps every page, which then can't be dropped
        assert file_speed.drop([whole]) is False


def test_parts_are_of_all_the_list_and_of_bounded_size() -> None:
    parts = file_speed.choose_parts([f"{number:05d}" for number in range(10_000)])
    assert [parts[0].shard, parts[32].shard] == ["00000", "05000"]
    assert sum(part.size for part in parts) <= file_speed.MOST_BYTES
    assert [part.shard for part in file_speed.choose_parts(["a", "b"])] == ["a", "b"]
