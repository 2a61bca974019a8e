"""Transfers end at their limits, follow no links, and happen in one module."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_ds.data import remote_files
from clap_ds.data.remote_files import RemoteFiles
from clap_ds.data.shard_io import open_shard
from clap_ds.utils.files import RefusedFileError
from tests import needs

ROOT = Path(remote_files.__file__).parents[2]
BLOCK = bytes(2**20)
# MiB, so that a test ends if it fails
ENDLESS = 200
CONTENT = b"content" * 100_000
# A link, and text for which fsspec's own pattern takes days.
SLOW_PAGE = b'<a href="step-00000001/"><a' + b" " * 10**5
CALLS = "get_file|put_file|cat_file|pipe_file|rm_file|cp_file|rm|mv|url_to_fs|filesystem"
TRANSFER = re.compile(
    rf"from fsspec|fsspec\.(?!get_filesystem_class|available_protocols)\w|\.({CALLS})\b"
)


class Handler(BaseHTTPRequestHandler):
    """A server that states no length, or a shorter one."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def do_HEAD(self) -> None:
        self.send_headers()

    def do_GET(self) -> None:
        blocks = [BLOCK] * ENDLESS
        if "honest" in self.path:
            blocks = [CONTENT]
        if "slow" in self.path:
            blocks = [SLOW_PAGE]
        self.send_headers()
        for block in blocks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
            Handler.sent += len(block)
        self.wfile.write(b"0\r\n\r\n")

    def send_headers(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        # states fewer bytes than it sends
        if "liar" in self.path and self.command == "HEAD":
            self.send_header("Content-Length", "1000")
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        # The client has had enough.
        except ConnectionError:
            self.close_connection = True


@pytest.fixture
def server() -> Iterator[str]:
    needs.package("aiohttp", "train")
    Handler.sent = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize("path", ["endless", "liar"])
def test_received_bytes_are_limited(server, tmp_path, shard_cache, path):
    files = RemoteFiles(f"{server}/{path}")
    with pytest.raises(RefusedFileError, match="bytes"):
        files.download("a", tmp_path / "a", 10**7)
    with suppress(RefusedFileError):
        assert len(files.read_start("a", 10**7)) <= 10**7
    with pytest.raises(RefusedFileError, match="bytes"):
        open_shard(f"{server}/{path}/a.tar", 10**7)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size]
    assert Handler.sent < 3 * ENDLESS / 2 * len(BLOCK)


def test_listing_of_hostile_server_ends(server):
    with pytest.raises(RefusedFileError, match="bytes"):
        RemoteFiles(f"{server}/endless").ls()
    assert [*RemoteFiles(f"{server}/slow").ls()] == ["step-00000001"]


def test_file_without_stated_length_is_received_whole(server, tmp_path):
    files = RemoteFiles(f"{server}/honest")
    assert files.read_start("a", 99_999) == CONTENT[:99_999]
    files.download("a", tmp_path / "a", len(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_caches_of_fsspec_are_bypassed():
    assert type(RemoteFiles("simplecache::memory://a")._fs) is MemoryFileSystem


def test_file_larger_than_disk_is_refused(tmp_path):
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**43)
    with pytest.raises(OSError, match="room on the disk"):
        RemoteFiles(f"file://{tmp_path}").download("sparse", tmp_path / "copy", 2**50)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("name", ["link", "folder/secret"])
def test_links_below_named_folder_are_not_followed(tmp_path, is_local, name):
    victim = tmp_path / "victim"
    target = tmp_path / "target"
    victim.mkdir()
    (victim / "secret").write_text("precious")
    target.mkdir()
    (target / "link").symlink_to(victim / "secret")
    (target / "folder").symlink_to(victim)
    (target / "good").write_text("good")
    # The named folder itself may be a link.
    (tmp_path / "root").symlink_to(target)
    files = RemoteFiles(f"{tmp_path}/root")
    # Else as file systems whose paths can't be pinned, such as sftp's.
    files._is_local = is_local
    for read in (
        lambda: files.read_start(name, 100),
        lambda: files.download(name, tmp_path / "copy", 100),
        lambda: files.upload(target, name, "new"),
    ):
        with pytest.raises(RefusedFileError):
            read()
    for write in (
        lambda: files.write(name, b"changed"),
        lambda: files.upload(target, "good", name),
        lambda: files.remove(name),
    ):
        # A link at the end is replaced or deleted itself.
        with suppress(RefusedFileError):
            write()
        assert (victim / "secret").read_text() == "precious"
    files.upload(target, "good", "new")
    assert files.read_start("new", 9) == b"good"


def test_only_remote_files_module_transfers():
    """In others, links and endless answers would be met again. The two exceptions transfer
    nothing."""
    modules = set()
    for folder in ("clap_ds", "launch", "analysis", "benchmarks", "examples"):
        modules |= set((ROOT / folder).rglob("*.py"))
    transferring = [path for path in modules if TRANSFER.search(path.read_text())]
    assert transferring == [Path(remote_files.__file__)]
