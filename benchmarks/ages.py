"""Ages of reports, in commits: `python -m benchmarks.ages` lists old reports.

The age of a report is the number of later commits to the folders that it measured.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("eqxlike",)
OLD = 20
UNKNOWN = "unknown"


def measured(folders: Sequence[str] = FOLDERS) -> dict[str, Any]:
    """The commit that a run measures. `dirty` if files of the folders have other changes."""
    commit = _git("rev-parse", "HEAD")
    is_dirty = commit and _git("status", "--porcelain", "--untracked-files=no", "--", *folders)
    return {"commit": f"{commit or UNKNOWN}{' dirty' if is_dirty else ''}", "folders": [*folders]}


def age(report: Mapping[str, Any]) -> int | None:
    """The age of a report, or `None` if the commit was not recorded or is not in the history."""
    commit = report.get("commit", UNKNOWN).partition(" ")[0]
    if commit == UNKNOWN:
        return None
    later = _git("rev-list", "--count", f"{commit}..HEAD", "--", *report["folders"])
    return int(later) if later else None


def described(report: Mapping[str, Any]) -> str:
    """The known part of the commit and the age of a report, as text."""
    commit, _, dirty = report.get("commit", UNKNOWN).partition(" ")
    if commit == UNKNOWN:
        return "commit not recorded"
    text = f"commit {commit[:10]}{' with changes' if dirty else ''}"
    commits = age(report)
    if commits is None:
        return text
    later = f"{commits} later commit{'' if commits == 1 else 's'}"
    return f"{text}, {later} to {', '.join(report['folders'])}"


def _git(*command: str) -> str | None:
    """The output of Git, or `None` if Git fails or is not installed."""
    try:
        found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return None if found.returncode else found.stdout.strip()


def main() -> int:
    """Lists the reports with more than `OLD` later commits."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        report = json.loads(path.read_text())
        if (age(report) or 0) > OLD:
            print(f"{path.name}: {report['machine']['date'][:10]}, {described(report)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
