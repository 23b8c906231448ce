"""Counts phrases that make sentences hard to read, in the package, the pages and the examples.

Prints each place. Fails if a part has more phrases per line than Equinox 0.13.8, which has 2 in
15,939 lines. Searches comments, strings and Markdown, but no code and no text in backticks.
"""

import io
import pathlib
import re
import subprocess
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
PHRASES = re.compile(r"\b(that of|those of|of which|what it|none does|beside)\b", re.IGNORECASE)
PARTS = {
    "package": ["eqxlike/*.py"],
    "pages": ["docs/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"],
    "examples": ["examples/*.py", "benchmarks/*.py", "benchmarks/README.md"],
}
BOUND = 2 / 15.939


def main() -> int:
    is_over = False
    for part, patterns in PARTS.items():
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
        done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in done.stdout.split()]
        found = [place for path in paths if path.exists() for place in _places(path)]
        num_lines = sum(len(path.read_text().splitlines()) for path in paths if path.exists())
        rate = 1000 * len(found) / num_lines
        count = f"{len(found):4} in {num_lines:6,} lines"
        print(f"{part:9} {count}: {rate:.2f} a thousand, at most {BOUND:.2f}", *found, sep="\n  ")
        is_over |= rate > BOUND
    return int(is_over)


def _places(path: pathlib.Path) -> list[str]:
    """The lines of a file that contain a phrase, with path and line number."""
    text = path.read_text()
    blocks = [(1, text)]
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
        blocks = [(token.start[0], token.string) for token in tokens if token.type in kinds]
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for start, block in blocks
        for number, line in enumerate(block.splitlines(), start=start)
        if PHRASES.search(re.sub(r"`[^`]*`|^[\"']\w+[\"']$", "", line))
    ]


if __name__ == "__main__":
    sys.exit(main())
