"""A short run of the tutorial on neural ODEs: Diffrax on eqxlike, in a separate process."""

import pathlib
import re
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "neural_ode.py"


def test_network_learns_the_pendulum_and_a_linear_law_does_not(tmp_path):
    picture = tmp_path / "swings.png"
    command = [sys.executable, str(SCRIPT), "--steps", "60", "--seconds", "1"]
    command += ["--out", str(picture)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    found = dict(re.findall(r"^(linear law|network) +(\d+\.\d+)", process.stdout, re.MULTILINE))
    assert float(found["network"]) < float(found["linear law"])
    assert picture.stat().st_size > 0
