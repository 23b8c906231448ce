"""JAX's compilation cache: a second process compiles nothing and reads the cached programs."""

import os
import subprocess
import sys

STEP = """
import jax, jax.numpy as jnp, jax.monitoring
import eqxlike as eqx

missed = []
jax.monitoring.register_event_listener(
    lambda event, **_: missed.append(event) if event.endswith("/cache_misses") else None
)
model = eqx.nn.Linear(2, 1, key=jax.random.key(0))

@eqx.filter_jit
def step(model, x):
    return eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)

step(model, jnp.ones((3, 2)))
print(len(missed))
"""


def test_second_process_compiles_nothing(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    options = {"env": os.environ | settings, "timeout": 120}
    first, second = (
        int(subprocess.check_output([sys.executable, "-c", line_before + STEP], **options))
        # The cache key does not contain the line numbers of the source.
        for line_before in ("", "\n")
    )
    assert first > 0 == second
