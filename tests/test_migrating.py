"""`docs/migrating.md` names, for what differs from Equinox, the tests that show it."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "migrating.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
POINTS = re.findall(r"^- (.*(?:\n  .*)*)", TEXT, flags=re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_test_that_is_named_is_there(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("point", POINTS)
def test_difference_has_a_test(point):
    assert "`tests/" in point
