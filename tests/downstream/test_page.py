"""The examples in docs/downstream.md print what the page shows."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "downstream.md").read_text()


def test_examples_print_what_the_page_shows():
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    program = "\n".join(text for kind, text in blocks if kind == "python")
    shown = "".join(text for kind, text in blocks if kind == "text")
    # A separate process, because this process may have imported Equinox.
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == shown
