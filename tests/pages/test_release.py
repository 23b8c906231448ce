"""`make release` in a small repository, with a stub instead of the check of the wheel."""

import pathlib
import subprocess

import pytest

from tests import scripts

ROOT = pathlib.Path(__file__).parents[2]
new = scripts.load(ROOT / ".ci/release/new.py", "new_release")

CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n- A layer.\n\n## [0.1.0] - 2026-01-01\n\n- The first.\n"
)
CITATION = 'type: software\nversion: 0.1.0\ndate-released: "2026-01-01"\nauthors: []\n'


@pytest.fixture
def repository(tmp_path):
    files = {
        "CHANGELOG.md": CHANGELOG,
        "CITATION.cff": CITATION,
        "eqxlike/_version.py": '__version__ = "0.1.0"\n',
        ".ci/check-release": "#!/bin/sh\ntest ! -e fails\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / ".ci/check-release").chmod(0o755)
    for command in (
        "init --quiet --initial-branch main",
        "config user.name Somebody",
        "config user.email somebody@example.org",
        "add .",
        "commit --quiet --message Begin",
        "tag v0.1.0",
    ):
        git(tmp_path, *command.split())
    return tmp_path


def git(folder, *arguments):
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_release_dates_the_changes_and_tags_them(repository, capfd):
    assert new.main(["0.2.0rc1"], repository) == 0
    assert new.main(["--changes"], repository) == 0
    assert capfd.readouterr().out.splitlines() == [
        "Tagged v0.2.0rc1. To publish: git push --follow-tags",
        "- A layer.",
    ]
    log = (repository / "CHANGELOG.md").read_text()
    assert log.startswith("# Changelog\n\n## [Unreleased]\n\n## [0.2.0rc1] - 20")
    assert "version: 0.2.0rc1\ndate-released:" in (repository / "CITATION.cff").read_text()
    assert (repository / "eqxlike/_version.py").read_text() == '__version__ = "0.2.0rc1"\n'
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "describe").strip() == "v0.2.0rc1"


@pytest.mark.parametrize(
    ("version", "prepare", "said"),
    [
        ("2", "", "expected a version such as 0.2.0 or 0.2.0rc1, got '2'"),
        ("0.1.0", "", "0.1.0 is no later than v0.1.0"),
        ("0.1.0rc1", "", "0.1.0rc1 is no later than v0.1.0"),
        ("0.2.0", "touch other", "commit or remove these files first:\n?? other"),
        ("0.2.0", "git checkout -q -b other", "and this is other"),
        ("0.2.0", "sed -i '/layer/d' CHANGELOG.md; git commit -qam x", '"Unreleased" of CHANGELOG'),
        ("0.2.0", "touch fails; git add .; git commit -qm x", "failed; no file was changed"),
    ],
)
def test_refused_release_changes_nothing(repository, capfd, version, prepare, said):
    subprocess.run(prepare, shell=True, cwd=repository, check=True)
    commands = [["status", "--porcelain"], ["log", "--format=%H"], ["tag"]]
    before = [git(repository, *each) for each in commands]
    assert new.main([version], repository) == 1
    assert said in capfd.readouterr().err
    assert [git(repository, *each) for each in commands] == before
