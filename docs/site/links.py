"""Links that the site has and the Markdown, read elsewhere, does without."""

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
    """`text`, with what stands outside of blocks of code changed."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def to_api(text: str) -> str:
    """Makes of each public name in `monospace` a link to its place in the API."""

    def linked(match: re.Match[str]) -> str:
        name = match[1].removeprefix("eqxlike.").removeprefix("eqx.")
        identifier = _identifiers().get(name)
        return f"[{match[0]}][{identifier}]" if identifier else match[0]

    def change(text: str) -> str:
        # A heading is a link already.
        return "\n".join(
            line if line.startswith("#") else CODE.sub(linked, line) for line in text.split("\n")
        )

    return outside_code(text, change)


def to_tests(text: str) -> str:
    """Makes of each test that is named a short link to it."""
    return OF_TEST.sub(rf'[test]({HOME}/\1 "\2"){{ .test }}', text)


def to_tutorials(text: str, paths: Mapping[str, str]) -> str:
    """Turns links to scripts of `examples/` into links to their pages.

    **Arguments:**

    - `text`: the Markdown of a page in `docs/`.
    - `paths`: the target of a link to the path of the page.
    """

    def to_page(match: re.Match[str]) -> str:
        return f"]({paths.get(match[1], match[1])}{match[2]})"

    return outside_code(text, lambda part: TARGET.sub(to_page, part))


def to_repository(text: str, folder: pathlib.Path) -> str:
    """Turns links to files of the repository that are not pages into links to its home."""

    def absolute(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        is_outside = not path.is_relative_to(ROOT / "docs")
        if path.is_relative_to(ROOT) and is_outside and path.exists():
            return f"]({HOME}/{path.relative_to(ROOT).as_posix()}{match[2]})"
        return match[0]

    return outside_code(text, lambda part: TARGET.sub(absolute, part))


@functools.cache
def _identifiers() -> dict[str, str]:
    """What a name is written as to its full name: `nn.Linear`, and `filter_jit`."""
    return {
        api.shown(page.module, name): f"{page.module}.{name}"
        for page in api.pages()
        for names in page.sections.values()
        for name in names.split()
        # One-word names of the top level that are words elsewhere too would be linked by mistake.
        if api.shown(page.module, name) not in AMBIGUOUS
    }


AMBIGUOUS = {"filter", "partition", "combine", "export", "field"}
