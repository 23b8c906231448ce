"""The examples in docstrings print the output that they show.

The test searches the source instead of the imported module, to find the examples of wrapped
methods and decorated functions.
"""

import ast
import doctest
import importlib
import io
import pathlib
from collections.abc import Callable, Iterator
from traceback import format_exception_only
from typing import Any
from unittest import mock

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "eqxlike"
DOCUMENTABLE = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def examples_in(source: str, name: str, filename: str) -> Iterator[doctest.DocTest]:
    """A DocTest with an empty namespace for each docstring of `source` with examples."""

    def visit(node: ast.AST, name: str) -> Iterator[doctest.DocTest]:
        is_documentable = isinstance(node, DOCUMENTABLE)
        if is_documentable and (docstring := ast.get_docstring(node, clean=False)):
            line = node.body[0].lineno - 1
            test = doctest.DocTestParser().get_doctest(docstring, {}, name, filename, line)
            if test.examples:
                yield test
        for child in (*getattr(node, "body", ()), *getattr(node, "orelse", ())):
            yield from visit(child, f"{name}.{child.name}" if hasattr(child, "name") else name)

    yield from visit(ast.parse(source), name)


def failures_of(test: doctest.DocTest) -> str:
    """Runs a test and returns doctest's report, which is empty if all examples pass."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    report = io.StringIO()
    # Before Python 3.11.4, doctest compared only the last line of an exception with notes.
    with mock.patch("traceback.format_exception_only", _in_one_piece):
        doctest.DocTestRunner(verbose=False, optionflags=options).run(test, out=report.write)
    return report.getvalue()


def _in_one_piece(
    *exception: Any, format_exception_only: Callable[..., list[str]] = format_exception_only
) -> list[str]:
    return ["".join(format_exception_only(*exception))]


def _all_examples() -> Iterator[tuple[str, doctest.DocTest]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        for test in examples_in(path.read_text(), module, str(path)):
            yield module, test


EXAMPLES = [pytest.param(module, test, id=test.name) for module, test in _all_examples()]


@pytest.mark.parametrize(("module", "test"), EXAMPLES)
def test_example_prints_its_output(module, test):
    # As in doctest, an example can use the names of its module.
    test.globs = dict(vars(importlib.import_module(module)))
    if report := failures_of(test):
        pytest.fail(report, pytrace=False)


SOURCE = '''
class Layer:
    def method(self):
        """Doubles.

        >>> 2 * 2
        {answer}
        """
'''


def test_wrong_example_fails():
    (test,) = examples_in(SOURCE.format(answer=5), "module", "module.py")
    assert "Expected:\n    5\nGot:\n    4" in failures_of(test)
