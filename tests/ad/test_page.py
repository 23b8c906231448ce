"""`docs/differentiation.md` shows what its examples print."""

import pathlib
import re

import jax
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "differentiation.md"
TEXT = PAGE.read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def test_page_has_examples():
    assert len(BLOCK.findall(TEXT)) >= 5


def test_examples_print_what_the_page_shows(capsys):
    names = {"__name__": "page"}
    for match in BLOCK.finditer(TEXT):
        # Empty lines in front, so that a traceback names the line of the page.
        lines_above = TEXT.count("\n", 0, match.start(1))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile("\n" * lines_above + match[1], str(PAGE), "exec"), names)
        assert capsys.readouterr().out == (match[2] or "")


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#\s]+)", TEXT))
def test_link_leads_somewhere(target):
    assert (PAGE.parent / target).exists()
