"""What the site takes from the repository around docs/: pages of the results, and the files that pages name.

Markdown outside of docs/ (`PAGES`) becomes pages of the site. A link or a path in code, such as `examples/train.py`, to
another file of the repository leads to a copy of it: Python and shell files as highlighted pages, others as they are.
A path that does not exist is a warning, and so ends the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "benchmarks/README.md", "benchmarks/*/README.md", "benchmarks/papers/*/*.md",
)  # fmt: skip
"""Patterns of Markdown files outside of docs/ that are pages of the site, at the same path."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", "Makefile": "makefile"}
"""Languages of files that are shown as pages, by suffix or name."""

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
PATH = re.compile(r"(?<![\[`])`((?:benchmarks|docs|examples|src|tests)/[\w./-]+\.\w+)((?:::\w+)?)`(?!\])")
"""A path of this repository in code, with the name of a test after it, and not in a link yet."""
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2`*\s*$", re.MULTILINE | re.DOTALL)

log = get_plugin_logger(__name__)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside of docs/, and copies of the files that pages name."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for page in list(files.documentation_pages()):
        for target in sorted(set(_named_in(page.content_string, _place(page.src_uri)))):
            if _site_path(target, files) is None and (ROOT / target).is_file():
                files.append(_copy(target, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the files are on the site."""
    place = page.file.src_uri
    if place.startswith("source/"):
        return markdown

    def follow(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        target, anchor = _target(link, _place(place))
        site_path = None if target is None else _site_path(target, files)
        if target is None or site_path is None:
            return match.group()  # mkdocs says what is wrong with it
        return before + posixpath.relpath(site_path, posixpath.dirname(place)) + anchor + after

    def name(match: re.Match[str]) -> str:
        path, test = match.groups()
        if "NAME" in path:  # a pattern, to be filled in
            return match.group()
        site_path = _site_path(path, files)
        if site_path is None:
            log.warning("%s names `%s`, which does not exist", place, path)
            return match.group()
        shown = path.removeprefix("src/gradwire/")
        return f"[`{shown}{test}`]({posixpath.relpath(site_path, posixpath.dirname(place))})"

    return "".join(piece if fenced else PATH.sub(name, LINK.sub(follow, piece)) for piece, fenced in _pieces(markdown))


def _pieces(markdown: str) -> Iterator[tuple[str, bool]]:
    """Text outside and inside of code blocks, in turn."""
    start = 0
    for match in FENCE.finditer(markdown):
        yield markdown[start : match.start()], False
        yield match.group(), True
        start = match.end()
    yield markdown[start:], False


def _named_in(markdown: str, place: str) -> Iterator[str]:
    """Paths in the repository that a page links to or names in code."""
    for piece, fenced in _pieces(markdown):
        if fenced:
            continue
        for _, link, _ in LINK.findall(piece):
            target, _ = _target(link, place)
            if target is not None:
                yield target
        yield from (path for path, _ in PATH.findall(piece))


def _target(link: str, place: str) -> tuple[str | None, str]:
    """Return the path in the repository that a link leads to, if it leads to a file, and its anchor."""
    path, mark, anchor = link.partition("#")
    if not path or ":" in path or path.startswith("/"):
        return None, ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), unquote(path))), mark + anchor


def _place(src_uri: str) -> str:
    """Path in the repository of a page."""
    return src_uri if (ROOT / src_uri).is_file() and not (ROOT / "docs" / src_uri).is_file() else f"docs/{src_uri}"


def _site_path(target: str, files: Files) -> str | None:
    """Path on the site of a file of the repository, or None if it is not there."""
    inside = target.removeprefix("docs/") if target.startswith("docs/") else target
    for path in (inside, f"source/{target}", f"source/{target}.md"):
        if (path == inside) and target.startswith("docs/") != (ROOT / "docs" / inside).exists():
            continue
        found = files.get_file_from_path(path)
        if found is not None and not found.inclusion.is_excluded():
            return path
    return None


def _copy(target: str, config: MkDocsConfig) -> File:
    """Return a copy of a file: a page with its text if that can be highlighted, otherwise the file."""
    path = ROOT / target
    language = LANGUAGES.get(path.suffix) or LANGUAGES.get(path.name)
    if language is None:
        return File.generated(config, f"source/{target}", abs_src_path=str(path))
    text = path.read_text()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    front = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n\n# {target}\n\n"
    return File.generated(config, f"source/{target}.md", content=f"{front}{fence}{language}\n{text}\n{fence}\n")
