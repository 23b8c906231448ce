"""The sources of the site document every public name, and quote errors exactly.

`make docs` builds the site, in mkdocs' strict mode.
"""

import ast
import collections
import importlib
import inspect
import pathlib
import re
import traceback
from collections.abc import Iterable

import pytest

from docs.site import api, chart, measured, tutorials

ROOT = pathlib.Path(__file__).parents[2]
ERRORS = (ROOT / "docs" / "errors.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
JAX_NOTE = re.compile(r"^-{20}\nFor simplicity, JAX has removed .*\n", re.MULTILINE)


def test_public_namespaces_show_exactly_their_reexports():
    on_pages = collections.defaultdict(list)
    for page in api.pages():
        on_pages[page.module] += [name for each in page.sections.values() for name in each.split()]
    for path in (ROOT / "eqxlike").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "._" in name:
            continue
        module = importlib.import_module(name)
        exec(f"from {name} import *", starred := {})
        nodes = ast.walk(ast.parse(path.read_text()))
        aliases = [node for node in nodes if isinstance(node, ast.alias)]
        reexports = _public(each.name for each in aliases if each.asname == each.name)
        assert _public(dir(module)) == _public(starred) == reexports, name
        objects = [each for each in reexports if not inspect.ismodule(getattr(module, each))]
        assert sorted(on_pages.pop(name)) == objects, name
    assert on_pages == {}


def _public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def test_chart_and_pages_of_measurements_show_the_committed_runs():
    for theme in chart.THEMES:
        assert chart.paths()[theme].read_text() == chart.draw(theme)
    # `python -m docs.site.measured` updates it.
    assert measured.SUMMARY.read_text() == measured.summary()
    shown = "".join(measured.files().values())
    assert [path for path in measured.RESULTS.glob("*.json") if path.name not in shown] == []


def test_every_output_belongs_to_an_example():
    kept = {path.stem for path in tutorials.OUTPUTS.iterdir()} | set(tutorials.TITLES)
    assert [name for name in sorted(kept) if not (tutorials.EXAMPLES / f"{name}.py").exists()] == []


def test_every_picture_belongs_to_an_example_that_draws():
    assert {path.stem for path in tutorials.PICTURES.iterdir()} == set(tutorials.PICTURED)
    for name in tutorials.PICTURED:
        assert '"--out"' in (tutorials.EXAMPLES / f"{name}.py").read_text()


def _matches(quoted: str, raised: str) -> bool:
    """Whether a quotation is exact. `...` matches any text."""
    pattern = ".*".join(map(re.escape, quoted.strip().split("...")))
    return re.fullmatch(pattern, raised.strip(), re.DOTALL) is not None


@pytest.mark.usefixtures("promotion")
def test_each_error_is_raised_as_it_is_quoted():
    names = {"__name__": "page"}
    raised, quoted = [], []
    for code, quotation in BLOCK.findall(ERRORS):
        try:
            exec(compile(code, "errors.md", "exec"), names)
        except Exception as error:
            raised.append(JAX_NOTE.sub("", "".join(traceback.format_exception_only(error))))
            quoted.append(quotation)
        else:
            assert quotation == "", code
    assert len(quoted) > 20
    for pair in zip(quoted, raised, strict=True):
        assert _matches(*pair), pair
