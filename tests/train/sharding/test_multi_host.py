"""The example of a training on several hosts, in a short form."""

import os
import re
import subprocess
import sys

import pytest

from tests import scripts
from tests.train.sharding import processes

PATH = processes.ROOT / "examples" / "multi_host.py"
SHORT = ["--steps", "20", "--width", "32", "--batch-size", "64"]


@pytest.fixture(scope="module")
def script():
    return scripts.load(PATH)


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(PATH), *SHORT, *arguments],
        cwd=processes.ROOT,
        env=os.environ | {"PYTHONPATH": str(processes.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(output):
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]


def test_two_processes_train_as_one_does(script, capsys):
    address = f"127.0.0.1:{processes.free_port()}"
    joined = [
        "--coordinator",
        address,
        "--processes",
        "2",
        "--heartbeat-timeout",
        "20",
        "--process",
    ]
    started = [start(*joined, number) for number in "01"]
    assert script.main(SHORT) == 0
    alone = capsys.readouterr().out
    (together, first_errors), (silent, errors) = map(processes.finish, started)
    assert [each.returncode for each in started] == [0, 0], first_errors + errors
    assert "2 processes, 4 devices" in together
    assert "1 processes, 2 devices" in alone
    assert "loss" not in silent
    assert len(losses(alone)) == 5
    assert losses(together) == pytest.approx(losses(alone), abs=2e-4)
    assert "A device holds (8, 32) of a weight of shape (32, 32)." in together
    assert "A device holds (16, 32) of a weight of shape (32, 32)." in alone


def test_coordinator_alone_is_refused(script, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main(["--coordinator", "127.0.0.1:1"])
    assert "--coordinator needs --processes and --process" in capsys.readouterr().err


def test_commands_in_the_docstring_have_options_that_there_are():
    source = PATH.read_text()
    commands = re.findall(r"python examples/multi_host.py(.*)", source.partition("import")[0])
    options = {option for line in commands for option in re.findall(r"--[a-z-]+", line)}
    assert options == {"--coordinator", "--processes", "--process", "--cluster"}
    assert all(f'"{option}"' in source for option in options)
