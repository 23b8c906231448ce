"""The example of a training on several hosts, in a short form."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.train.sharding import processes

PATH = processes.ROOT / "examples" / "multi_host.py"
SHORT = ["--steps", "20", "--width", "32", "--batch-size", "64"]


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


def test_two_processes_train_as_one_does():
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
    first, second, alone = start(*joined, "0"), start(*joined, "1"), start()
    printed = [processes.finish(each) for each in (first, second, alone)]
    assert [each.returncode for each in (first, second, alone)] == [0, 0, 0], printed
    (together, _), (silent, _), (single, _) = printed
    assert "2 processes, 4 devices" in together
    assert "1 processes, 2 devices" in single
    assert "loss" not in silent
    assert losses(together) == pytest.approx(losses(single), abs=2e-4)
    assert len(losses(single)) == 5
    assert losses(single)[-1] < losses(single)[0]
    assert "A device holds (8, 32) of a weight of shape (32, 32)." in together
    assert "A device holds (16, 32) of a weight of shape (32, 32)." in single


def test_coordinator_alone_is_refused():
    process = start("--coordinator", "127.0.0.1:1")
    assert "--coordinator needs --processes and --process" in processes.finish(process)[1]
    assert process.returncode == 2


def test_commands_in_the_docstring_have_options_that_there_are():
    source = pathlib.Path(PATH).read_text()
    commands = re.findall(r"python examples/multi_host.py(.*)", source.partition("import")[0])
    options = {option for line in commands for option in re.findall(r"--[a-z-]+", line)}
    assert options == {"--coordinator", "--processes", "--process", "--cluster"}
    assert all(f'"{option}"' in source for option in options)
