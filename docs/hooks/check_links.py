"""Check every link of the built site: files and anchors within it, and the form of addresses elsewhere.

mkdocs checks links in Markdown. This reads the HTML, so it also finds links in raw HTML and in generated pages.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger

HOST = re.compile(r"[\w-]+(\.[\w-]+)+(:\d+)?")

log = get_plugin_logger(__name__)


class Links(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := given.get(name)) and tag != "base"]
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}


def on_post_build(config: MkDocsConfig) -> None:
    """Warn about each link that leads nowhere, and say how many were checked."""
    site = Path(config.site_dir).resolve()
    pages = {path: Links(path.read_text()) for path in sorted(site.rglob("*.html"))}
    inside, outside = 0, 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute, for a server
            continue
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("//"):
                outside += 1
                problem = wrong_form(link)
            else:
                inside += 1
                problem = leads_nowhere(link, path, site, pages)
            if problem:
                log.warning("%s: the link %s %s", path.relative_to(site), link, problem)
    log.info("%d pages: checked %d links within the site, and the form of %d others", len(pages), inside, outside)


def wrong_form(link: str) -> str | None:
    """Return what is wrong with an address elsewhere. There is no network when the site is built."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto", "javascript"):
        return None
    if parts.scheme != "https" or not HOST.fullmatch(parts.netloc) or re.search(r"[\s<>`]", link):
        return "is not an https address"
    return None


def leads_nowhere(link: str, path: Path, site: Path, pages: dict[Path, Links]) -> str | None:
    """Return what is wrong with a link within the site."""
    parts = urlsplit(link)
    if parts.path.startswith("/"):
        return "is absolute"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site) or not target.is_file():
        return "leads to no file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors and not anchor.startswith("__"):
        return "leads to no anchor"
    return None
