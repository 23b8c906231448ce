"""Processes with devices of their own, each of which runs `on_devices`."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[3]
TIMEOUT_S = 120


def start(num_devices: int, **options: Any) -> subprocess.Popen:
    flags = re.sub(r"(device_count)=\d+", rf"\1={num_devices}", os.environ["XLA_FLAGS"])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.sharding.on_devices", json.dumps(options)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """What a process printed; it is ended if it takes too long."""
    try:
        return process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it hung: {process.communicate()[1][-2000:]}") from None


def results(process: subprocess.Popen) -> dict[str, Any]:
    output, errors = finish(process)
    assert process.returncode == 0, errors[-2000:]
    # Libraries print as well.
    return json.loads(output.splitlines()[-1])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
