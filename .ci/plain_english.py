"""Counts phrases that make sentences hard to read, in the package, the pages and the examples.

Fails if there are more of them in a thousand lines than in Equinox 0.13.8: 2 in 15,939 lines.
`--show` prints each line.
"""

import pathlib
import re
import subprocess
import sys

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
        names = subprocess.run(
            listed, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        lines = [
            (f"{name}:{number}", line)
            for name in names
            for number, line in enumerate((ROOT / name).read_text().splitlines(), start=1)
        ]
        found = [f"{place}: {line.strip()}" for place, line in lines if PHRASES.search(line)]
        rate = 1000 * len(found) / len(lines)
        count = f"{len(found):4} in {len(lines):6,} lines"
        print(f"{part:9} {count}: {rate:.2f} a thousand, at most {BOUND:.2f}")
        if rate > BOUND or "--show" in sys.argv:
            print("\n".join(found))
        is_over |= rate > BOUND
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
