"""Training on the devices of two processes, which save one state together."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eqxlike import train
from tests import scripts
from tests.train.sharding import trainings

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "multi_host.py"
SHORT = ["--steps", "5", "--width", "32", "--batch-size", "64"]


# Two processes with two devices each. They are forked before JAX and Orbax start threads. The
# coordination service only listens on the loopback interface.
SCRIPT = """
import json, os, pathlib, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from eqxlike import train
from tests.train.sharding import trainings
import orbax.checkpoint

address, folder, answers = sys.argv[1:]
other = os.fork()
index = int(other == 0)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, index, coordinator_bind_address=address)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
whole = NamedSharding(rows.mesh, P())

def make(values, sharding):
    return jax.make_array_from_callback(values.shape, sharding, lambda place: values[place])

values = np.arange(16, dtype=np.float32).reshape(8, 2)
split_keys = jax.jit(lambda seed: jax.random.split(jax.random.key(seed), 4), out_shardings=rows)

def make_state(seed, values):
    small = make(values.astype(jnp.float8_e5m2), rows)
    arrays = {"rows": make(values, rows), "small": small, "whole": make(values, whole)}
    return arrays | {"keys": split_keys(seed)}

state, like = make_state(0, values), make_state(1, 0 * values)

def parts(state):
    data = state | {"keys": jax.random.key_data(state["keys"])}
    return jax.tree.map(lambda x: [shard.data.tolist() for shard in x.addressable_shards], data)

with train.CheckpointFolder(folder) as checkpoints:
    saving = checkpoints.save(1, state, {"epoch": 1}, background=True)
    restored, data = checkpoints.restore_newest(like)
    found = {"is_done": saving.is_done, "data": data, "same": parts(restored) == parts(state)}
    found["steps"] = [path.name for path in checkpoints.paths()]
answer = json.dumps(found | trainings.run_short())
pathlib.Path(answers, str(index)).write_text(answer)
jax.distributed.shutdown()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def test_two_processes_train_and_save_together_and_one_restores(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    folder, answers = tmp_path / "run", tmp_path / "answers"
    answers.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, address, folder, answers],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    alone = trainings.run_short()
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-2000:]
    found = [json.loads((answers / str(index)).read_text()) for index in range(2)]
    assert alone["part"] == (4, 8)
    for each in found:
        # The processes train like one process. Each has its own parts of the arrays.
        np.testing.assert_allclose(each["losses"], alone["losses"], rtol=1e-5)
        assert (each["part"], each["compiled"]) == ([4, 4], 0)
        # Each process restores its parts. Reading waits for the background save.
        assert (each["same"], each["data"], each["is_done"]) == (True, {"epoch": 1}, True)
        assert each["steps"] == ["step_000000001"]
    # Each part has a separate file.
    (rows,) = folder.glob("step_000000001/arrays/*.rows")
    assert sorted(os.listdir(rows)) == [".zarray", "0.0", "1.0", "2.0", "3.0"]

    columns = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P(None, "x"))
    like = {
        "keys": jax.random.split(jax.random.key(1), 4),
        "rows": jax.ShapeDtypeStruct((8, 2), np.float32, sharding=columns),
        "small": jnp.zeros((8, 2), jnp.float8_e5m2),
        "whole": np.zeros((8, 2), np.float32),
    }
    state, data = train.CheckpointFolder(folder).restore_newest(like)
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    assert data == {"epoch": 1}
    assert state["rows"].sharding == columns
    assert state["rows"].tolist() == state["whole"].tolist() == values.tolist()
    assert state["small"].tolist() == values.astype(jnp.float8_e5m2).tolist()
    keys = jax.random.split(jax.random.key(0), 4)
    assert (jax.random.key_data(state["keys"]) == jax.random.key_data(keys)).all()


# --- a short run of the example with several hosts ---


@pytest.fixture(scope="module")
def script():
    return scripts.load(EXAMPLE)


def test_the_example_joins_other_processes_and_prints_its_part(script, capsys, monkeypatch):
    joined = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *at, **how: joined.update(how, at=at))
    address = "127.0.0.1:9876"
    options = ["--coordinator", address, "--processes", "2", "--process", "0"]
    assert script.main([*SHORT, *options, "--heartbeat-timeout", "20"]) == 0
    assert joined == {
        "at": (address,),
        "num_processes": 2,
        "process_id": 0,
        "coordinator_bind_address": address,
        "heartbeat_timeout_seconds": 20,
        "shutdown_timeout_seconds": 20,
    }
    output = capsys.readouterr().out
    assert "1 processes, 2 devices" in output
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "A device holds (16, 32) of a weight of shape (32, 32)." in output
