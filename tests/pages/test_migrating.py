"""The files and tests named in pages, `tests/conftest.py` and `benchmarks/all.py` exist, and
`docs/migrating.md` names a test for each difference from Equinox.
"""

import ast
import functools
import pathlib
import re

from benchmarks import all as everything

ROOT = pathlib.Path(__file__).parents[2]
PAGE, _, TABLE = (ROOT / "docs" / "migrating.md").read_text().partition("## Tests\n")


@functools.cache
def names_in(path):
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def exists(file, name):
    path = ROOT / "tests" / file
    return path.exists() and (not name or name in names_in(path))


def test_named_files_and_tests_exist():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests/conftest.py"]
    text = "".join(page.read_text() for page in pages)
    named = set(re.findall(r"\btests/([\w/.]*\w)(?:::(\w+))?", text))
    of_gpu = (*everything.TESTED, *everything.SEVERAL_DEVICES, *everything.NOT_ON_ONE_GPU)
    named |= {each.partition("::")[::2] for each in of_gpu}
    assert len(named) > 100
    assert sorted(each for each in named if not exists(*each)) == []


def test_each_difference_has_a_test():
    sections = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
    points = [
        f"{title}, {number}"
        for title, text in sections
        for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    ]
    assert len(points) > 50
    assert re.findall(r"^\| (.*?, \d+) \| `tests/", TABLE, re.MULTILINE) == points
