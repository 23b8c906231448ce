"""The costs of depth: building a hundred layers, and compiling a stack of equal layers."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import eqxlike
from benchmarks import layer_models, networks
from benchmarks.cases import Case, check_agreement
from benchmarks.layer_networks import EQUINOX, NNX, OURS
from benchmarks.layer_rows import Row, Table, check_sizes
from benchmarks.layer_timing import Prepare
from benchmarks.timing import Call

ARRAYS = "arrays alone"
SCAN_STACK = "ScanStack"
SEQUENTIAL = "Sequential"

CONSTRUCT = Table("Construct a deep model, compared with one jax.random.uniform call a parameter")
COMPILE = Table("Trace, lower and compile a stack of equal layers", is_first_call=True)


def sequential(depth: int, width: int) -> Row:
    """The row that builds a `Sequential` of linear layers."""
    return _construct(
        f"Sequential of {depth} Linear, width {width}",
        lambda library: layer_models.linears(library, width, depth, jax.random.key(0)),
        lambda peer: peer.linears(width, depth, jax.random.key(0)),
        layer_models.linear_shapes(width, depth),
    )


def mlp(depth: int, width: int) -> Row:
    """The row that builds an MLP with `depth` hidden layers."""
    sizes = layer_models.MLPSizes(features=width, width=width, depth=depth, classes=width)
    return _construct(
        f"MLP of depth {depth}, width {width}",
        lambda library: layer_models.mlp(library, sizes, jax.random.key(0)),
        lambda peer: peer.mlp(sizes, jax.random.key(0)),
        layer_models.linear_shapes(width, depth + 1),
    )


def stack(depth: int, width: int) -> Row:
    """The row that compiles `depth` layers, in a loop and in sequence."""
    x = networks.normal(width, seed=1)
    columns = (SEQUENTIAL, SCAN_STACK)

    def prepare(column: str) -> Call:
        model, function = stack_model(column, depth, width), _new_function()
        return lambda: function.lower(model, x).compile()

    def check(preparations: Mapping[str, Prepare]) -> None:
        check_agreement(
            {
                column: functools.partial(prepare()(), stack_model(column, depth, width), x)
                for column, prepare in preparations.items()
            },
            times=1,
        )

    def count_lines() -> dict[str, int]:
        lowered = {
            column: _new_function().lower(stack_model(column, depth, width), x)
            for column in columns
        }
        return {column: len(program.as_text().splitlines()) for column, program in lowered.items()}

    def build(column: str) -> Prepare:
        return functools.partial(prepare, column)

    builders = {column: functools.partial(build, column) for column in columns}
    case = Case(f"{depth} MLPs of width {width}", builders, baseline=SEQUENTIAL)
    return Row(COMPILE, case, check, count_lines)


def stack_model(column: str, depth: int, width: int) -> Any:
    """MLPs with one hidden layer of twice the width, stored as in the column."""
    keys = layer_models.split_keys(jax.random.key(0), depth)
    layers = [eqxlike.nn.MLP(width, width, 2 * width, 1, key=key) for key in keys]
    arrange = eqxlike.nn.Sequential if column == SEQUENTIAL else eqxlike.nn.ScanStack.stack
    return arrange(layers)


def _new_function() -> Any:
    """A function that was never compiled. Libraries find a compiled function by the original."""
    return eqxlike.filter_jit(lambda model, x: model(x))


def _construct(
    name: str,
    make: Callable[[Any], Any],
    make_nnx: Callable[[Any], Any],
    shapes: Sequence[tuple[int, ...]],
) -> Row:
    """The row that builds a model.

    **Arguments:**

    - `name`: the name of the row.
    - `make`: makes the model with a library, eqxlike or Equinox.
    - `make_nnx`: makes the model with NNX, from `benchmarks.nnx_layer_models`.
    - `shapes`: the shapes of the parameters.
    """
    limit = shapes[0][-1] ** -0.5

    def bind(function: Callable[[Any], Any], module: str) -> Call:
        return functools.partial(function, importlib.import_module(module))

    builders = {
        ARRAYS: lambda: lambda: layer_models.uniform_arrays(shapes, limit, jax.random.key(0)),
        OURS: lambda: bind(make, "eqxlike"),
        EQUINOX: lambda: bind(make, "equinox"),
        NNX: lambda: bind(make_nnx, "benchmarks.nnx_layer_models"),
    }
    return Row(CONSTRUCT, Case(name, builders, baseline=ARRAYS), check_sizes)
