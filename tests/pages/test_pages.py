"""The pages in `docs/` show what their examples print, and link to what is there."""

import pathlib
import re
import tomllib

import jax
import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
NAMES = (
    "bayes.md",
    "differentiation.md",
    "generate.md",
    "graph.md",
    "loops.md",
    "pretrained.md",
    "profiling.md",
    "retraces.md",
    "shipping.md",
    "stable-maths.md",
    "training.md",
    "transfers.md",
)
SITE = (
    "index.md",
    "get-started.md",
    "from-pytorch.md",
    "from-flax.md",
    "works-with.md",
    "costs.md",
    "models.md",
    "calls.md",
    "demo.md",
)
TEXTS = {name: (DOCS / name).read_text() for name in NAMES + SITE}
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", TEXTS)
def test_examples_print_what_the_page_shows(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what an example writes does not land in the repository
    monkeypatch.delenv("EQXLIKE_PROGRESS", raising=False)
    text, names = TEXTS[name], {"__name__": "page"}
    for match in BLOCK.finditer(text):
        # Empty lines in front, so that a traceback names the line of the page.
        code = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(code, str(DOCS / name), "exec"), names)
        assert capsys.readouterr().out == (match[2] or "")


def test_get_started_lists_each_extra_that_a_user_is_told_of():
    root = DOCS.parent
    sources = [root / "README.md", *DOCS.glob("*.md"), *(root / "eqxlike").rglob("*.py")]
    named = re.findall(r"eqxlike\[([\w,]+)\]'", "".join(path.read_text() for path in sources))
    told = {extra for names in named for extra in names.split(",")}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    listed = set(re.findall(r"^\| `(\w+)` \|", TEXTS["get-started.md"], re.MULTILINE))
    assert told <= listed <= set(project["optional-dependencies"])


# Pages in `measured/` and `tutorials/` are generated for the site.
LINKS = [
    (name, target)
    for name, text in TEXTS.items()
    for target in re.findall(r"\]\((?!measured/|tutorials/)([^)#\s]+)", text)
]


def test_links_lead_somewhere():
    assert [pair for pair in LINKS if not (DOCS / pair[0]).parent.joinpath(pair[1]).exists()] == []
