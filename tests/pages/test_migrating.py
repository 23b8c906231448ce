"""`docs/migrating.md` and `docs/internal.md` name tests, for what differs from Equinox, that are
there.
"""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE, _, TABLE = (ROOT / "docs" / "migrating.md").read_text().partition("## Tests\n")


@functools.cache
def names_in(file):
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", ["migrating", "internal"])
def test_each_test_that_is_named_is_there(page):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / f"{page}.md").read_text())
    assert len(named) > 5
    assert [(file, name) for file, name in named if name not in names_in(file)] == []


def test_each_difference_has_a_test():
    sections = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
    points = [
        f"{title}, {number}"
        for title, text in sections
        for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    ]
    assert len(points) > 50
    assert re.findall(r"^\| (.*?, \d+) \| `tests/", TABLE, re.MULTILINE) == points
