"""A URL whose package is missing is refused with the command that installs it."""

import sys

import pytest
from fsspec.registry import _registry

from clap_ds.config.urls import find_url_problems


@pytest.mark.parametrize(
    ("url", "package", "command"),
    [
        ("https://host/a.tar", "aiohttp", "pip install 'clap-ds[train]'"),
        ("s3://bucket/{0..3}.tar", "s3fs", "pip install 'clap-ds[s3]'"),
        ("gs://bucket/*.tar", "gcsfs", "pip install 'clap-ds[gcs]'"),
        ("sftp://host/a.tar", "paramiko", "pip install paramiko"),
    ],
)
@pytest.mark.parametrize("shards", [lambda url: url, lambda url: {"local/*.tar": 1, url: 2}])
def test_url_with_missing_package_names_command(url, package, command, shards, monkeypatch):
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    for name in ("http", "sftp"):
        monkeypatch.delitem(sys.modules, f"fsspec.implementations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    (problem,) = find_url_problems({"data": {"shards": shards(url)}})
    assert problem.startswith(f"clap.data.shards: {url}: ")
    assert problem.endswith(command)
