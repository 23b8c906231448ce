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
    "recipes.md",
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
    "layers.md",
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


MARKDOWN = [
    path
    for folder in (".", "docs", "benchmarks", "profiling", "examples")
    for path in sorted((DOCS.parent / folder).glob("*.md"))
]
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(path):
    """The anchors that GitHub and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {each.replace(" ", "-") for each in words}


def test_each_relative_link_leads_somewhere_in_a_clone():
    links = [
        (path, path.parent / target if target else path, anchor)
        for path in MARKDOWN
        for target, anchor in LINK.findall(FENCE.sub("", path.read_text()))
    ]
    assert len(links) > 100
    lost = [(str(path), str(to)) for path, to, _ in links if not to.exists()]
    assert lost == []
    in_pages = [link for link in links if link[1].suffix == ".md"]
    astray = [
        (str(path), anchor) for path, to, anchor in in_pages if anchor and anchor not in anchors(to)
    ]
    # Material's images for one theme.
    assert [each for each in astray if not each[1].startswith("only-")] == []


def test_contributing_has_the_layers_of_the_contract():
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    (contract,) = (
        each for each in project["tool"]["importlinter"]["contracts"] if each["id"] == "parts"
    )
    layers = [{*re.findall(r"\w+", layer)} for layer in reversed(contract["layers"])]
    text = (DOCS.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.*?) \|", text, re.MULTILINE)
    assert [{*re.findall(r"`(\w+?)(?:/|\.py)`", row)} for row in rows] == layers
