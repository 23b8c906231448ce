"""Two processes save one state together, and one process goes on from it."""

import json
import os
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

# One of two processes with two devices each. The service listens on the loopback interface alone.
SCRIPT = """
import json, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from eqxlike import train
from eqxlike.train._checkpoints import _save

index, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, index, coordinator_bind_address=address)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
whole = NamedSharding(rows.mesh, P())

def make(values, sharding):
    return jax.make_array_from_callback(values.shape, sharding, lambda place: values[place])

values = np.arange(16, dtype=np.float32).reshape(8, 2)
split_keys = jax.jit(lambda seed: jax.random.split(jax.random.key(seed), 4), out_shardings=rows)
state = {
    "keys": split_keys(0),
    "rows": make(values, rows),
    "small": make(values.astype(jnp.float8_e5m2), rows),
    "whole": make(values, whole),
}
like = {
    "keys": split_keys(1),
    "rows": make(0 * values, rows),
    "small": make(0 * values.astype(jnp.float8_e5m2), rows),
    "whole": make(0 * values, whole),
}
def parts(state):
    data = state | {"keys": jax.random.key_data(state["keys"])}
    return jax.tree.map(lambda x: [shard.data.tolist() for shard in x.addressable_shards], data)

with train.CheckpointFolder(folder) as checkpoints:
    saving = checkpoints.save(1, state, {"epoch": 1}, background=True)
    restored, data = checkpoints.restore_newest(like)
    found = {"is_done": saving.is_done, "data": data, "same": parts(restored) == parts(state)}
    if index == 1:
        def fail(*_):
            raise OSError("the disk is on fire")
        _save.write_arrays = fail
    try:
        checkpoints.save(2, {"replicated": state["whole"]})
    except OSError as error:
        found["error"] = str(error)
    found["steps"] = [path.name for path in checkpoints.paths()]
print(json.dumps(found))
"""


def free_address():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder that two processes wrote, and the last line of each."""
    folder = tmp_path_factory.mktemp("run")
    address, pipe = free_address(), subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(index), address, str(folder)],
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_each_process_gets_its_parts_back(run):
    _, found = run
    assert [each["same"] for each in found] == [True, True]
    assert [each["data"] for each in found] == [{"epoch": 1}] * 2


def test_save_in_the_background_is_done_when_it_returns(run):
    _, found = run
    assert [each["is_done"] for each in found] == [True, True]


def test_process_whose_disk_fails_stops_the_others(run):
    _, found = run
    assert found[1]["error"] == "the disk is on fire"
    assert found[0]["error"] == "A checkpoint failed in process 1, whose own error says why."
    assert [each["steps"] for each in found] == [["step_000000001"]] * 2


def test_one_process_goes_on_with_another_mesh(run):
    folder, _ = run
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


def test_each_part_is_a_file_of_its_own(run):
    folder, _ = run
    (rows,) = folder.glob("step_000000001/arrays-*/*.rows")
    assert sorted(os.listdir(rows)) == [".zarray", "0.0", "1.0", "2.0", "3.0"]
