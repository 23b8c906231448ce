"""Makes a release: `make release VERSION=0.2.0`, on a clean checkout of the main branch.

It dates the section "Unreleased" of CHANGELOG.md, writes the version, builds and checks the wheel
and the sdist, commits and tags. It pushes nothing. After `git push --follow-tags`, the workflow
"Release" publishes the tag. If the check fails, all files are restored.

`new.py --changes` prints the newest dated section of the changelog.
"""

import argparse
import datetime
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)((a|b|rc)(0|[1-9]\d*))?")
UNRELEASED = "## [Unreleased]\n"
CHANGELOG, CITATION, VERSION_FILE = "CHANGELOG.md", "CITATION.cff", "eqxlike/_version.py"


def main(arguments: list[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("version", nargs="?", help="for example 0.2.0 or 0.2.0rc1")
    chosen.add_argument("--changes", action="store_true", help="print the newest dated section")
    options = parser.parse_args(arguments)
    try:
        if options.changes:
            print(changes((root / CHANGELOG).read_text()))
        else:
            release(options.version, root)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


class ReleaseError(Exception):
    """The reason why the release stopped."""


def release(version: str, root: pathlib.Path) -> None:
    """Writes, checks, commits and tags a version."""
    _check(version, root)
    files = [root / name for name in (CHANGELOG, CITATION, VERSION_FILE)]
    before = [file.read_text() for file in files]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        for file, text in zip(files, dated(*before, version=version, date=today), strict=True):
            file.write_text(text)
        if subprocess.run([root / ".ci/check-release"], cwd=root).returncode:
            raise ReleaseError("the check of the wheel and the sdist failed; no file was changed.")
        _git(root, "commit", "--quiet", "--all", "--message", f"Release {version}")
    except BaseException:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
        raise
    _git(root, "tag", "--annotate", f"v{version}", "--message", f"eqxlike {version}")
    print(f"Tagged v{version}. To publish: git push --follow-tags")


def dated(
    changelog: str, citation: str, code: str, *, version: str, date: str
) -> tuple[str, str, str]:
    """The texts of the three files with the new version and date."""
    changelog = changelog.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {date}\n", 1)
    citation = re.sub(r"^(version|date-released): .*\n", "", citation, flags=re.MULTILINE)
    citation = citation.replace(
        "type: software\n", f'type: software\nversion: {version}\ndate-released: "{date}"\n'
    )
    code = re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', code, flags=re.MULTILINE)
    return changelog, citation, code


def changes(changelog: str) -> str:
    """The newest dated section of a changelog, without its heading."""
    found = re.search(
        r"^## \[\d[^\]]*\] - [-\d]+\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise ReleaseError(f"{CHANGELOG} has no dated section.")
    return found[1].strip()


def _check(version: str, root: pathlib.Path) -> None:
    if not VERSION.fullmatch(version):
        raise ReleaseError(f"expected a version such as 0.2.0 or 0.2.0rc1, got {version!r}.")
    if changed := _git(root, "status", "--porcelain"):
        raise ReleaseError(f"commit or remove these files first:\n{changed}")
    if (branch := _git(root, "branch", "--show-current")) != "main":
        raise ReleaseError(
            f"releases are made on the branch main, and this is {branch or 'no branch'}."
        )
    tags = _git(root, "tag", "--list", "v*").split()
    if later := [tag for tag in tags if _order(tag[1:]) >= _order(version)]:
        raise ReleaseError(f"{version} is no later than {', '.join(later)}.")
    text = (root / CHANGELOG).read_text()
    found = re.search(rf"^{re.escape(UNRELEASED)}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ReleaseError(
            f'the section "Unreleased" of {CHANGELOG} is empty: list what users will meet.'
        )


def _order(version: str) -> tuple[int, int, int, str, int]:
    """A key that sorts versions: a candidate comes before its release."""
    found = VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"the tag v{version} is no version.")
    major, minor, patch, _, kind, number = found.groups()
    return int(major), int(minor), int(patch), kind or "release", int(number or 0)


def _git(root: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
