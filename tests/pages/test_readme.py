"""The README's Python code runs. The changelog, citation and URL agree with the package."""

import pathlib
import re
import subprocess
import tomllib

import pytest

import eqxlike

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()

BLOCKS = [
    pytest.param(match[1], README.count("\n", 0, match.start(1)), id=f"line{number}")
    for match in re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for number in [README.count("\n", 0, match.start(1)) + 1]
]

PROJECT = (ROOT / "pyproject.toml").read_text()
HOME = tomllib.loads(PROJECT)["project"]["urls"]["Homepage"]


@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize(("block", "lines_above"), BLOCKS)
def test_block_runs(block, lines_above, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for files that an example writes
    # Leading empty lines make a traceback name the line of the README.
    code = compile("\n" * lines_above + block, str(ROOT / "README.md"), "exec")
    exec(code, {"__name__": "readme"})


def test_each_cell_of_the_table_has_a_link():
    rows = re.findall(r"^\| (?!---|\|)(\S.*) \|$", README, re.MULTILINE)
    cells = [cell for row in rows for cell in row.split(" | ")[1:]]
    assert cells
    assert [cell for cell in cells if not re.fullmatch(r"\[[^\]]+\]\(\S+\)", cell)] == []


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_names_the_commands_for_the_demo_and_the_tests(command):
    target = command.removeprefix("make ")
    assert re.search(rf"^{command}\b", README, re.MULTILINE)
    assert re.search(rf"^{target}:$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_changelog_begins_with_the_unreleased_changes():
    sections = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    for each in sections[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+((a|b|rc)\d+)?\] - \d{4}-\d\d-\d\d", each), each


def test_citation_has_the_version_and_the_date_of_the_changelog():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r"^version: (\S+)$", citation, re.MULTILINE)
    assert version is not None
    assert version[1] == eqxlike.__version__
    released = re.search(rf"^## \[{re.escape(version[1])}\] - (\S+)$", CHANGELOG, re.MULTILINE)
    date = re.search(r'^date-released: "(\S+)"$', citation, re.MULTILINE)
    assert (date and date[1]) == (released and released[1])


def test_only_pyproject_has_the_url_of_the_repository():
    address = HOME.removeprefix("https://")
    listed = ["git", "grep", "-l", address]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pyproject.toml"]
    assert {*re.findall(r"https://github\.com/[\w-]+/[\w-]+", PROJECT)} == {HOME}
