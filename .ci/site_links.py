"""Add the repository's files that pages link to to the site and adjust the links, as an mkdocs
hook."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)]*)?\)")
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def path_of(uri: str) -> str:
    """Return the path in the repository of a file of the site."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def target_of(link: str, uri: str) -> Path:
    """Return the repository's file for a link of the page; for a folder, its README."""
    path = Path(os.path.normpath(ROOT / path_of(uri) / ".." / link))
    return path / "README.md" if (path / "README.md").is_file() else path


def uri_of(target: Path) -> str:
    """Return the site's path of a file of the repository."""
    path = target.relative_to(ROOT).as_posix()
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def on_files(files: Any, config: Any) -> None:
    """Add pages, and then the files that they link to."""
    uris = [file.src_uri for file in files.documentation_pages()] + list(PAGES)
    while uris:
        uri = uris.pop()
        if not files.get_file_from_path(uri):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))
        if not uri.endswith(".md"):
            continue
        page = (ROOT / path_of(uri)).read_text(encoding="utf-8")
        for _, link, _ in LINK.findall(page):
            target = target_of(link, uri)
            if target.is_file() and not files.get_file_from_path(uri_of(target)):
                uris.append(uri_of(target))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri

    def adjusted(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        target = target_of(link, uri)
        if target.is_dir():
            return text
        if not target.is_file():
            return match[0]  # mkdocs reports it
        relative = os.path.relpath(uri_of(target), os.path.dirname(uri) or ".")
        return f"[{text}]({relative}{anchor or ''})"

    return LINK.sub(adjusted, markdown)
