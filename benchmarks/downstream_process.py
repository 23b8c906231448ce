"""Times a program of `tests/downstream` on one library: `python -m benchmarks.downstream_process
LIBRARY TOPIC PROGRAM` prints what `timed` returns, as JSON.

Nothing here imports eqxlike before it is known whether eqxlike is wanted.
"""

import json
import sys
import time
from typing import Any

from tests.downstream import run
from tests.downstream.registry import programs_of

WARM_S = 0.5
"""Later calls are made for this long, and at least three."""


def timed(library: str, topic: str, program: str) -> dict[str, Any]:
    """Times a program in this process, which has imported neither library yet.

    **Returns:** the seconds of its first call, of each of the later ones, and the sums of the
    arrays that it returned.
    """
    run.begin(library)
    import jax
    import numpy as np

    call = programs_of(topic)[program].run
    start_s = time.perf_counter()
    found = jax.block_until_ready(call())
    first_s = time.perf_counter() - start_s
    later_s: list[float] = []
    while len(later_s) < 3 or sum(later_s) < WARM_S:
        start_s = time.perf_counter()
        jax.block_until_ready(call())
        later_s.append(time.perf_counter() - start_s)
    run.check_library(library)
    sums = [float(np.nansum(np.abs(array))) for array in run.arrays_of(found).values()]
    return {"first_s": first_s, "later_s": later_s, "sums": sums}


if __name__ == "__main__":
    print(json.dumps(timed(*sys.argv[1:])))
