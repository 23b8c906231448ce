"""Adds links to the pages of the site: to the API, tests, tutorials and the repository."""

import functools
import pathlib
import re
import tomllib
from collections.abc import Callable, Mapping

from docs.site import api

ROOT = pathlib.Path(__file__).parents[2]
_project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = _project["urls"]["Homepage"]
HOME = f"{REPOSITORY}/blob/main"

FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!Equinox's )(?<![\[`])`([\w.]+)(?:\([^`\n]*\))?`(?![\]`])")
OF_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
TARGET = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)\s]*)?)\)")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Applies `change` to `text`, except in blocks of code."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def to_api(text: str) -> str:
    """Makes each public name in `monospace` a link to its entry in the API reference."""

    def linked(match: re.Match[str]) -> str:
        name = match[1].removeprefix("eqxlike.").removeprefix("eqx.")
        identifier = _identifiers().get(name)
        return f"[{match[0]}][{identifier}]" if identifier else match[0]

    def change(text: str) -> str:
        # A heading is already a link.
        return "\n".join(
            line if line.startswith("#") else CODE.sub(linked, line) for line in text.split("\n")
        )

    return outside_code(text, change)


def to_tests(text: str) -> str:
    """Replaces each id of a test by a short link to its file."""
    return OF_TEST.sub(rf'[test]({HOME}/\1 "\2"){{ .test }}', text)


def to_tutorials(text: str, paths: Mapping[str, str]) -> str:
    """Turns links to scripts of `examples/` into links to their pages.

    **Arguments:**

    - `text`: the Markdown of a page in `docs/`.
    - `paths`: maps the target of a link to the path of the page.
    """

    def to_page(match: re.Match[str]) -> str:
        return f"]({paths.get(match[1], match[1])}{match[2]})"

    return outside_code(text, lambda part: TARGET.sub(to_page, part))


def to_repository(text: str, folder: pathlib.Path) -> str:
    """Turns links to files that are not pages into links to the repository on GitHub."""

    def absolute(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        is_outside = not path.is_relative_to(ROOT / "docs")
        if path.is_relative_to(ROOT) and is_outside and path.exists():
            return f"]({HOME}/{path.relative_to(ROOT).as_posix()}{match[2]})"
        return match[0]

    return outside_code(text, lambda part: TARGET.sub(absolute, part))


@functools.cache
def _identifiers() -> dict[str, str]:
    """Maps the names that pages use, such as `nn.Linear` and `filter_jit`, to full names."""
    return {
        api.shown(page.module, name): f"{page.module}.{name}"
        for page in api.pages()
        for names in page.sections.values()
        for name in names.split()
        # Some top-level names are also ordinary words, which must not become links.
        if api.shown(page.module, name) not in AMBIGUOUS
    }


AMBIGUOUS = {"filter", "partition", "combine", "export", "field"}
