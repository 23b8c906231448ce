"""The costs of the layers of eqxlike.nn, compared with Equinox and NNX.

Four networks are constructed, called for the first time, called again and differentiated. Deep
models are constructed, and stacks of equal layers are compiled. An attention and a convolution are
differentiated and compared with JAX's and PyTorch's functions. A check before timing compares the
outputs and gradients that all libraries compute from the same weights. Only constructed models
differ, because each library draws its own initial values.

`benchmarks.timing` describes the method. `benchmarks.layer_timing` times first calls and
compilations, without a compilation cache on disk. Ctrl-C prints the finished rows.
"""

import sys
from collections.abc import Sequence

import jax

from benchmarks import command, layer_cases, layer_depth, layer_fused, layer_kernels, layer_rows
from benchmarks.layer_networks import NETWORKS
from benchmarks.layer_rows import Row

NAME = "benchmarks.layers"
ROUNDS = command.Rounds(default=50, quick=5)
FIRST_ROUNDS = command.Rounds(default=15, quick=2)

ROWS: tuple[Row, ...] = (
    *map(layer_cases.construct, NETWORKS),
    *map(layer_cases.first_construct, NETWORKS),
    *map(layer_cases.first_call, NETWORKS),
    *map(layer_cases.compilation, NETWORKS),
    *map(layer_cases.forward, NETWORKS),
    *map(layer_cases.gradient, NETWORKS),
    layer_depth.sequential(depth=100, width=64),
    layer_depth.mlp(depth=100, width=64),
    *(layer_depth.stack(depth, width=64) for depth in (4, 16, 64)),
    *(
        layer_fused.attention(width, length, batch, table)
        for table in (layer_fused.FORWARD, layer_fused.GRADIENT)
        for width, length, batch in ((32, 16, 4), (128, 64, 4), (512, 1, 1))
    ),
    *(
        layer_kernels.attention(length, batch, is_causal)
        for length, batch in ((128, 8), (256, 8), (1024, 2), (4096, 1))
        for is_causal in (True, False)
    ),
    *(
        layer_kernels.convolution(*sizes)
        for sizes in (
            (32, 64, 64, 32, 1),
            (32, 256, 64, 14, 1),
            (32, 32, 64, 32, 3),
            (32, 64, 64, 16, 3),
            (16, 128, 128, 28, 3),
        )
    ),
)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS, FIRST_ROUNDS)
    status, _ = layer_rows.measure_rows(NAME, options, rows)
    return status


if __name__ == "__main__":
    # With a cache on disk, a first call would compile nothing. The cache must be disabled before
    # JAX compiles its first program.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
