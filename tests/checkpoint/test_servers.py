"""Shards, checkpoints and weights are read from servers, which may be slow, broken or moved."""

import functools
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.remote import BackgroundSync, find_or_download, find_weights
from clap_ds.config.model import load_preset
from clap_ds.config.schema import CheckpointSettings
from clap_ds.data import remote_files
from clap_ds.data.remote_files import RemoteFiles
from clap_ds.data.shard_io import open_shard
from clap_ds.data.shard_manifest import ShardManifest, expand_shards, read_manifest
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import exit_code_of
from clap_ds.weights.formats import save_transformers
from tests import needs
from tests.weights.fake_checkpoints import (
    CONTENTS,
    checkpoint_of,
    make_checkpoint,
    save_safetensors,
)

TAR = bytes(range(256)) * 5000


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder. The next answers to GET have the faults in `faults`."""

    faults: ClassVar[list[str]] = []
    paths: ClassVar[list[str]] = []
    stop = threading.Event()

    def do_GET(self) -> None:
        self.paths.append(self.path)
        fault = self.faults.pop(0) if self.faults else ""
        if not fault:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(TAR)))
        self.end_headers()
        self.wfile.write(TAR[:1000])
        if fault == "stalled":
            self.stop.wait(60)

    def send_head(self) -> Any:
        if not self.path.startswith("/old/"):
            return super().send_head()
        self.send_response(302)
        self.send_header("Location", self.path.replace("old", "new"))
        self.end_headers()
        return None

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def short_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(remote_files, "STALL_S", 0.5)


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    """The URL at which the folder `new` is served."""
    needs.package("aiohttp", "train")
    # Else its client has other tests' time limit.
    fsspec.get_filesystem_class("http").clear_instance_cache()
    Handler.faults.clear()
    Handler.paths.clear()
    Handler.stop.clear()
    handler = functools.partial(Handler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/new"
        Handler.stop.set()
        server.shutdown()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder in a new bucket."""
    for package in ("s3fs", "moto"):
        needs.package(package, "test-s3")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    file_system = fsspec.get_filesystem_class("s3")
    file_system.clear_instance_cache()
    # All servers of a process share their buckets.
    bucket = f"bucket-{uuid.uuid4().hex}"
    file_system().mkdir(bucket)
    yield f"s3://{bucket}/new"
    server.stop()


@pytest.fixture(params=["http", "s3"])
def store(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def publish(folder: Path, url: str) -> None:
    """Copy a folder to a bucket; a server of HTTP has it already."""
    if url.startswith("s3"):
        fsspec.get_filesystem_class("s3")().put(f"{folder}/", url, recursive=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that is served at the URL."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.tar").write_bytes(TAR)
    return tmp_path / "new"


def test_shards_are_listed_and_read(store, folder):
    publish(folder, store)
    assert expand_shards(f"{store}/*.tar") == [f"{store}/a.tar"]
    assert open_shard(f"{store}/a.tar").read(0, 2 * len(TAR)) == TAR
    assert read_manifest(store) == ShardManifest({})
    with pytest.raises(FileNotFoundError):
        open_shard(f"{store}/b.tar")
    # Only the client asks again, as HEAD failed.
    assert Handler.paths.count("/new/b.tar") <= 1


@pytest.mark.parametrize("fault", ["stalled", "cut"])
def test_faulty_answer_is_asked_for_again(http, folder, fault):
    Handler.faults += [fault]
    assert open_shard(f"{http}/a.tar").read(0, 2 * len(TAR)) == TAR
    # as of a manifest
    Handler.faults += [fault]
    assert RemoteFiles(http).read_start("a.tar", 2 * len(TAR)) == TAR


def test_redirect_is_followed(http, folder):
    moved = http.replace("new", "old")
    assert open_shard(f"{moved}/a.tar").read(0, 2 * len(TAR)) == TAR


@pytest.mark.parametrize(("fault", "message"), [("stalled", "stopped sending"), ("cut", "payload")])
def test_server_that_never_answers_in_full_is_named(http, folder, tmp_path, fault, message):
    Handler.faults += [fault] * 5
    with pytest.raises(OSError, match=message):
        open_shard(f"{http}/a.tar")
    assert not [*(tmp_path / "cache").rglob("*.tar"), *(tmp_path / "cache").rglob("*.part")]


def test_newest_complete_checkpoint_is_resumed(store, folder, tmp_path):
    for step in (5, 10, 15):
        make_checkpoint(folder, step)
    # as an upload under way
    (folder / "step-00000015" / "manifest.json").unlink()
    publish(folder, store)
    path = find_or_download(tmp_path / "local", store, None)
    assert path == tmp_path / "local" / "step-00000010"
    for name, content in CONTENTS.items():
        assert (path / name).read_bytes() == content + b"10"


@pytest.fixture(scope="module")
def model() -> ClapModel:
    torch.manual_seed(4)
    return ClapModel(load_preset("micro"))


@pytest.mark.parametrize("name", ["a.safetensors", "transformers", "run", "run/step-00000002"])
def test_weights_of_each_format_are_copied_once(store, folder, model, name, capsys):
    save_safetensors(model, folder / "a.safetensors")
    save_transformers(model, folder / "transformers")
    for step in (1, 2):
        checkpoint_of(model, folder / "run", step)
    publish(folder, store)
    # as by the ranks of a host
    with ThreadPoolExecutor(4) as pool:
        loaded = [*pool.map(load_weights, [f"{store}/{name}"] * 4)]
    fingerprint = load_weights(f"file://{folder}/{name}").fingerprint
    assert {weights.fingerprint for weights in loaded} == {fingerprint}
    tensors = [path for path in Handler.paths if path.endswith("safetensors")]
    assert len(tensors) <= 1


def test_best_checkpoint_is_copied(http, folder, model):
    for step, top1 in ((1, 0.9), (2, 0.1)):
        options = {"metrics": {"zero_shot_top1": top1}, "best_metric": "zero_shot_top1"}
        checkpoint_of(model, folder, step, **options)
    assert find_weights(http, best=True).name == "step-00000001"
    assert load_weights(http, best=True).reached.startswith("step 1,")


@pytest.mark.parametrize("name", ["a.pt", "a/b"])
def test_missing_weights_are_reported_without_signature(http, folder, name, capsys):
    url = f"{http}/{name}?X-Amz-Signature=hush"
    assert exit_code_of(lambda: load_weights(url)) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {http}/{name}?[hidden]")
    assert "hush" not in message


def test_copies_of_checkpoints_are_resumed_from_s3(s3, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "run", 5)
    sync = BackgroundSync(s3, CheckpointSettings(), tmp_path / "run")
    sync.submit(checkpoint)
    assert not sync.close(30)
    path = find_or_download(tmp_path / "local", None, s3)
    assert (path / "manifest.json").read_bytes() == (checkpoint / "manifest.json").read_bytes()
