"""Transfers end at their limits, follow no links, and happen in one module."""

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from clap_ds.data import remote_files
from clap_ds.data.remote_files import RemoteFiles
from clap_ds.data.shard_io import open_shard
from clap_ds.utils.files import RefusedFileError
from tests import needs

ROOT = Path(remote_files.__file__).parents[2]
BLOCK = bytes(2**20)
ENDLESS = 200  # MiB, so that a test ends if it fails
CONTENT = b"content" * 100_000
CALLS = "get_file|put_file|cat_file|pipe_file|rm_file|cp_file|rm|mv|url_to_fs|filesystem"
TRANSFER = re.compile(rf"from fsspec|fsspec\.(?!get_filesystem_class)\w|\.({CALLS})\b")


class Handler(BaseHTTPRequestHandler):
    """Answers without a length, and answers that are longer than a HEAD request was told."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        blocks = [BLOCK] * ENDLESS
        if "honest" in self.path:
            blocks = [CONTENT]
        if "slow" in self.path:
            blocks = [b'<a href="step-00000001/"><a' + b" " * 10**5]
        self.answer()
        for block in blocks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
            Handler.sent += len(block)
        self.wfile.write(b"0\r\n\r\n")

    def answer(self) -> None:
        is_liar = "liar" in self.path
        self.send_response(206 if is_liar and self.command == "GET" else 200)
        self.send_header("Content-Type", "text/html")
        if is_liar and self.command == "HEAD":
            self.send_header("Content-Length", "1000")
            self.send_header("Accept-Ranges", "bytes")
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client has had enough
            self.close_connection = True


@pytest.fixture
def server() -> Iterator[str]:
    needs.package("aiohttp", "test")
    Handler.sent = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_what_is_received_is_limited_whatever_the_server_states(
    server: str, tmp_path: Path, shard_cache: Path
) -> None:
    for place in ("endless", "liar"):
        files = RemoteFiles(f"{server}/{place}")
        with pytest.raises(RefusedFileError, match="bytes"):
            files.download("a", tmp_path / "a", 10**7)
        with suppress(RefusedFileError):
            assert len(files.read_start("a", 10**7)) <= 10**7
        with pytest.raises(RefusedFileError, match="bytes"):
            open_shard(f"{server}/{place}/a.tar", 10**7)
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert Handler.sent < 6 * ENDLESS / 2 * len(BLOCK)
    with pytest.raises(RefusedFileError, match="bytes"):
        RemoteFiles(f"{server}/endless").ls()
    assert [*RemoteFiles(f"{server}/slow").ls()] == [
        "step-00000001"
    ]  # fsspec's own pattern takes days
    honest = RemoteFiles(f"{server}/honest")
    assert honest.read_start("a", 10**7) == CONTENT
    assert honest.read_start("a", 99_999) == CONTENT[:99_999]
    honest.download("a", tmp_path / "a", len(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("chain", ["simplecache::", "filecache::"])
def test_caches_of_fsspec_are_bypassed(chain: str) -> None:
    assert type(RemoteFiles(f"{chain}memory://a")._fs) is type(fsspec.filesystem("memory"))


def test_a_disk_without_room_is_named_before_the_download(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    with (tmp_path / "sparse").open("ab") as file:
        file.truncate(2**43)
    with pytest.raises(OSError, match="room on the disk"):
        RemoteFiles(f"file://{tmp_path}").download("sparse", tmp_path / "copy", 2**50)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("name", ["link", "folder/secret"])
def test_no_link_below_the_named_folder_is_followed(
    tmp_path: Path, is_local: bool, name: str
) -> None:
    victim = tmp_path / "victim"
    named = tmp_path / "named"
    victim.mkdir()
    (victim / "secret").write_text("precious")
    named.mkdir()
    (named / "link").symlink_to(victim / "secret")
    (named / "folder").symlink_to(victim)
    (tmp_path / "root").symlink_to(named)  # the named folder itself may be a link
    (named / "good").write_text("good")
    files = RemoteFiles(f"{tmp_path}/root")
    files._is_local = is_local  # else as file systems whose paths can't be pinned, such as sftp's
    for read in (
        lambda: files.read_start(name, 100),
        lambda: files.download(name, tmp_path / "copy", 100),
        lambda: files.upload(named, name, "new"),
    ):
        with pytest.raises(RefusedFileError):
            read()
    for write in (
        lambda: files.write(name, b"changed"),
        lambda: files.upload(named, "good", name),
        lambda: files.remove(name),
    ):
        with suppress(RefusedFileError):  # a link at the end is replaced or deleted itself
            write()
        assert [path.name for path in victim.iterdir()] == ["secret"]
        assert (victim / "secret").read_text() == "precious"
    files.upload(named, "good", "new")
    assert files.read_start("new", 9) == b"good"


def test_no_other_module_transfers_remote_files() -> None:
    """In others, links and endless answers would be met again. `fsspec.get_filesystem_class`
    transfers nothing."""
    folders = ("clap_ds", "launch", "analysis", "benchmarks", "examples")
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert [path for path in paths if TRANSFER.search(path.read_text())] == [
        Path(remote_files.__file__)
    ]
