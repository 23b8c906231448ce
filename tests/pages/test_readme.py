"""The README's Python runs, and what it links to is there."""

import pathlib
import re
import tomllib

import jax
import pytest

import eqxlike

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

BLOCKS = [
    pytest.param(match[1], README.count("\n", 0, match.start(1)), id=f"line{number}")
    for match in re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for number in [README.count("\n", 0, match.start(1)) + 1]
]

PROJECT = (ROOT / "pyproject.toml").read_text()
HOME = tomllib.loads(PROJECT)["project"]["urls"]["Homepage"]

# [text](target), ![text](target), src="target" and their like, less the anchor.
LINKS = sorted(
    {
        target
        for pair in re.findall(r"\]\(([^)#\s]+)|(?:src|srcset|href)=\"([^\"#]+)", README)
        for target in pair
        if target
    }
)


@pytest.mark.parametrize(("block", "lines_above"), BLOCKS)
def test_block_runs(block, lines_above, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what an example writes does not land in the repository
    # Empty lines in front, so that a traceback names the line in the README.
    code = compile("\n" * lines_above + block, str(ROOT / "README.md"), "exec")
    # As a reader has it: Optax's Adam asks for promotions that the strict run refuses.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code, {"__name__": "readme"})


def test_links_into_the_repository_are_relative_and_lead_somewhere():
    home = HOME.removeprefix("https://github.com")
    assert [target for target in LINKS if home in target and target != f"{HOME}/issues"] == []
    own = [target for target in LINKS if not target.startswith("https://")]
    assert own
    assert [path for path in own if not (ROOT / path).exists()] == []


def test_repository_has_one_address():
    stated = PROJECT + (ROOT / "CITATION.cff").read_text()
    assert {*re.findall(r"https://github\.com/[\w-]+/[\w-]+", stated)} == {HOME}


def test_each_cell_beside_equinox_and_nnx_is_linked():
    rows = re.findall(r"^\| (?!---|\|)(\S.*) \|$", README, re.MULTILINE)
    cells = [cell for row in rows for cell in row.split(" | ")[1:]]
    assert cells
    assert [cell for cell in cells if not re.fullmatch(r"\[[^\]]+\]\(\S+\)", cell)] == []


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_it_names_the_commands_that_show_and_check_it(command):
    target = command.removeprefix("make ")
    assert re.search(rf"^{command}\b", README, re.MULTILINE)
    assert re.search(rf"^{target}:$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_changelog_begins_with_a_dated_section_of_this_version():
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert re.fullmatch(rf"\[{re.escape(eqxlike.__version__)}\] - \d{{4}}-\d\d-\d\d", first[1])


def test_citation_has_the_version_and_date_of_the_changelog():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r"^version: (\S+)$", citation, re.MULTILINE)
    date = re.search(r'^date-released: "(\S+)"$', citation, re.MULTILINE)
    assert version is not None
    assert date is not None
    assert f"## [{version[1]}] - {date[1]}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert version[1] == eqxlike.__version__
