"""Times a program of `tests/downstream` on one library: `python -m benchmarks.downstream_process
LIBRARY TOPIC PROGRAM` prints the output of `timed` as JSON.

The imports of this file must not import eqxlike, because the process may run Equinox.
"""

import json
import sys
import time
from typing import Any

from tests.downstream import run
from tests.downstream.registry import programs_of

WARM_S = 0.5
"""The time for later calls. There are at least three."""


def timed(library: str, topic: str, program: str) -> dict[str, Any]:
    """Times a program in this process, which must not have imported either library.

    **Returns:** the seconds of the first call and of each later call, and the sums of the arrays
    that the program returned.
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
