"""The README's Python runs, and what it links to is there."""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

BLOCKS = [
    pytest.param(match[1], README.count("\n", 0, match.start(1)), id=f"line{number}")
    for match in re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for number in [README.count("\n", 0, match.start(1)) + 1]
]

# [text](target), ![text](target) and src="target", less the anchor; other sites are left alone.
LINKS = sorted(
    {
        target
        for pair in re.findall(r"\]\(([^)#\s]+)|(?:src|href)=\"([^\"#]+)", README)
        for target in pair
        if target and not re.match(r"[a-z]+:", target)
    }
)


def test_readme_has_python_blocks():
    assert BLOCKS


@pytest.mark.parametrize(("block", "lines_above"), BLOCKS)
def test_block_runs(block, lines_above, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what an example writes does not land in the repository
    # Empty lines in front, so that a traceback names the line in the README.
    code = compile("\n" * lines_above + block, str(ROOT / "README.md"), "exec")
    # As a reader has it: Optax's Adam asks for promotions that the strict run refuses.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code, {"__name__": "readme"})


@pytest.mark.parametrize("target", LINKS)
def test_link_leads_somewhere(target):
    assert (ROOT / target).exists()
