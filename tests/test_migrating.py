"""`docs/migrating.md` names, for what differs from Equinox, the tests that show it."""

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "migrating.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
POINTS = re.findall(r"^- (.*(?:\n  .*)*)", TEXT, flags=re.MULTILINE)


@functools.cache
def names_in(file):
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_test_that_is_named_is_there():
    assert [(file, name) for file, name in NAMED if name not in names_in(file)] == []


def test_each_difference_has_a_test():
    assert len(POINTS) > 50
    assert [point for point in POINTS if "`tests/" not in point] == []
