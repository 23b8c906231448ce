"""The examples in `docs/` print the output on the page, and the targets of links exist."""

import pathlib
import re
import tomllib

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
NAMES = (
    "bayes differentiation generate graph loops pretrained profiling recipes retraces shipping "
    "stable-maths training transfers index get-started from-pytorch from-flax works-with costs "
    "models layers demo"
)
TEXTS = {f"{name}.md": (DOCS / f"{name}.md").read_text() for name in NAMES.split()}
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize("name", TEXTS)
def test_examples_print_the_output_on_the_page(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for files that an example writes
    monkeypatch.delenv("EQXLIKE_PROGRESS", raising=False)
    text, names = TEXTS[name], {"__name__": "page"}
    for match in BLOCK.finditer(text):
        # Leading empty lines make a traceback name the line of the page.
        code = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        exec(compile(code, str(DOCS / name), "exec"), names)
        assert capsys.readouterr().out == (match[2] or "")


def test_get_started_lists_each_extra_in_pages_and_messages():
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
LINK = re.compile(r"(?:\]\(|(?:src|srcset|href)=\")(?!https?:)([^)\"#\s]*)(?:#([^)\"\s]+))?[)\"]")


def anchors(path):
    """The anchors of the headings of a page, on GitHub and on the site."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {each.replace(" ", "-") for each in words}


def test_each_relative_link_has_a_target():
    links = [
        (path, path.parent / target if target else path, anchor)
        for path in MARKDOWN
        for target, anchor in LINK.findall(FENCE.sub("", path.read_text()))
    ]
    assert len(links) > 100
    lost = [(str(path), str(to)) for path, to, _ in links if not to.exists()]
    assert lost == []
    # `#only-light` and `#only-dark` choose an image of the theme Material and are no anchors.
    anchored = [link for link in links if link[2] and not link[2].startswith("only-")]
    lost = [(str(path), anchor) for path, to, anchor in anchored if anchor not in anchors(to)]
    assert lost == []


def test_contributing_has_the_layers_of_the_contract():
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["id"] == "parts")
    layers = [{*re.findall(r"\w+", layer)} for layer in reversed(contract["layers"])]
    text = (DOCS.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.*?) \|", text, re.MULTILINE)
    assert [{*re.findall(r"`(\w+?)(?:/|\.py)`", row)} for row in rows] == layers
