"""Hooks of mkdocs: generated pages, and checks of the built site."""

import logging
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

from docs.site import api_pages, links, measured, tutorials  # noqa: E402

# Elements that load a resource from another site. Links are allowed.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link[^>]*rel=[\"']?(?:stylesheet|preconnect|preload|icon)[^>]*href=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<pre[^>]*class=[\"']?mermaid|data-md-component=[\"']?source[\"' >]"
    r"|url\([\"']?(?:https?:)?//[^)]+|@import\s+[\"'](?:https?:)?//[^\"']+",
)

GENERATED = {"api": api_pages, "measured": measured, "tutorials": tutorials}


def on_config(config: Any) -> Any:
    """Sets the URL of the repository, and adds the generated pages to the menu.

    In strict mode mkdocs fails if warnings were logged. `--quiet` would suppress them, so the level
    is at most WARNING.
    """
    logger = logging.getLogger("mkdocs")
    logger.setLevel(min(logger.level, logging.WARNING))
    config.repo_url = links.REPOSITORY
    for entry in config.nav:
        for title, what in entry.items():
            if isinstance(what, str) and what in GENERATED:
                entry[title] = GENERATED[what].menu()
    return config


def on_files(files: Files, config: Any) -> Files:
    for source in GENERATED.values():
        for path, text in source.files().items():
            files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    if page.file.src_uri.startswith("api/"):
        return markdown  # docstrings.py has added the links
    if page.file.abs_src_path is not None:
        folder = pathlib.Path(page.file.abs_src_path).parent
        markdown = links.to_tutorials(links.to_tests(markdown), tutorials.paths())
        markdown = links.to_repository(markdown, folder)
    if page.file.src_uri == measured.SUMMARY.name:
        markdown += f"\n{measured.index()}"
    return links.to_api(markdown)


def on_post_build(config: Any) -> None:
    """Raises an error if a page loads a resource from another site.

    The theme's script loads Mermaid, or the number of stars on GitHub, if a page uses them.
    """
    for path in pathlib.Path(config.site_dir).rglob("*"):
        if path.suffix in (".html", ".css"):
            if found := FETCHED.search(path.read_text()):
                raise PluginError(f"{path}: {found[0]} is loaded from another site.")
