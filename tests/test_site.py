"""What the site is made of: no public name is forgotten, and each error is the one that it quotes.

`make docs` builds the site itself, strictly.
"""

import pathlib
import re
import traceback

import jax
import pytest

from docs.site import api, chart, measured, tutorials

ERRORS = (pathlib.Path(__file__).parents[1] / "docs" / "errors.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
JAX_NOTE = re.compile(r"^-{20}\nFor simplicity, JAX has removed .*\n", re.MULTILINE)


def test_every_public_name_stands_on_one_page_of_the_api():
    listed = {module.__name__: [] for module in api.public_modules()}
    for page in api.pages():
        listed[page.module] += [name for each in page.sections.values() for name in each.split()]
    expected = {each.__name__: sorted(api.public_names(each)) for each in api.public_modules()}
    assert {module: sorted(names) for module, names in listed.items()} == expected


@pytest.mark.parametrize("theme", chart.THEMES)
def test_the_chart_is_that_of_the_committed_run(theme):
    assert chart.paths()[theme].read_text() == chart.draw(theme)


def test_every_report_has_a_page():
    shown = "".join(measured.files().values())
    missing = [path.name for path in measured.RESULTS.glob("*.json") if path.name not in shown]
    assert missing == []


def test_every_output_is_that_of_an_example():
    kept = {path.stem for path in tutorials.OUTPUTS.iterdir()} | set(tutorials.TITLES)
    assert [name for name in sorted(kept) if not (tutorials.EXAMPLES / f"{name}.py").exists()] == []


def test_every_picture_is_that_of_an_example_that_draws():
    assert {path.stem for path in tutorials.PICTURES.iterdir()} == set(tutorials.PICTURED)
    for name in tutorials.PICTURED:
        assert '"--out"' in (tutorials.EXAMPLES / f"{name}.py").read_text()


def _matches(quoted: str, raised: str) -> bool:
    """Whether a quotation is exact, but for `...` that stands for anything."""
    pattern = ".*".join(map(re.escape, quoted.strip().split("...")))
    return re.fullmatch(pattern, raised.strip(), re.DOTALL) is not None


def test_each_error_is_raised_as_it_is_quoted():
    names = {"__name__": "page"}
    raised, quoted = [], []
    for code, quotation in BLOCK.findall(ERRORS):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            try:
                exec(compile(code, "errors.md", "exec"), names)
            except Exception as error:
                text = "".join(traceback.format_exception_only(error))
                raised.append(JAX_NOTE.sub("", text))
                quoted.append(quotation)
            else:
                assert quotation == "", code
    assert len(quoted) > 20
    for pair in zip(quoted, raised, strict=True):
        assert _matches(*pair), pair
