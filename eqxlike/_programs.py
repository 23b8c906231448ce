"""Traced programs: equations, interpretation, host callbacks. Collectives of compiled programs."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, jaxprs_in_params

from ._traceback import frame_of_user


def equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr. An equation comes before the equations of its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations_in(inner)


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    run: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    of_literal: Callable[[Literal], Any] = operator.attrgetter("val"),
) -> list[Any]:
    """Interprets a jaxpr: `run(equation, inputs)` computes the outputs of each equation.

    **Arguments:**

    - `of_literal`: function that makes an input from a literal of the program.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> Any:
        return of_literal(atom) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = run(equation, list(map(read, equation.invars)))
        values.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(
    equation: JaxprEqn,
    inputs: Iterable[Any],
    params: dict[str, Any] | None = None,
    primitive: Primitive | None = None,
) -> Sequence[Any]:
    """Runs one equation on `inputs`. `params` and `primitive` replace its own ones."""
    primitive = equation.primitive if primitive is None else primitive
    params = equation.params if params is None else params
    with equation.ctx.manager:
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return outputs if primitive.multiple_results else [outputs]


# --- Host callbacks in a traced program ---


_CALLS = {
    "check": "error_if",
    "debug_callback": "jax.debug.callback or jax.debug.print",
    "debug_print": "jax.debug.print",
    "infeed": "infeed",
    "io_callback": "io_callback",
    "outfeed": "outfeed",
    "pure_callback": "pure_callback",
}
"""Maps each primitive that calls Python on the host to the public function that binds it."""


def departures(jaxpr: Any) -> Iterator[str]:
    """Descriptions of the host callbacks in a jaxpr and its inner jaxprs.

    A description is the name of a public function, with file and line if JAX knows them.
    """
    for equation in equations_in(jaxpr):
        what = _CALLS.get(equation.primitive.name)
        if what is not None:
            frame = frame_of_user(equation.source_info)
            yield f"{what} at {frame.file_name}:{frame.line_num}" if frame else what


# --- The collectives of a compiled program ---


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")


class Collective(NamedTuple):
    """One exchange between devices, of one or more arrays at once.

    - `kind`: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute` or
      `collective-broadcast`.
    - `shapes`: the shapes of the resulting arrays on one device.
    - `num_bytes`: the total size of these arrays in bytes.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int


def collectives(compiled: Any) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in the order of its text.

    A collective inside a loop is listed once.

    **Arguments:**

    - `compiled`: a compiled program: the result of `filter_jit(...).lower(...).compile()` or
      `jax.jit(...).lower(...).compile()`.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> optimiser, sharding = optax.sgd(0.1), train.data_parallel()
    >>> state = train.TrainState.create(
    ...     nn.Linear(2, 3, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> def loss(model, x, key):
    ...     return jnp.mean(jax.vmap(model)(x) ** 2)
    >>> step = train.make_step(loss, optimiser, sharding=sharding)
    >>> x = jnp.ones((4 * jax.device_count(), 2))
    >>> compiled = step.lower(train.shard(state, sharding), x).compile()
    >>> {each.kind for each in collectives(compiled)} <= {"all-reduce"}
    True
    """
    return tuple(
        _collective(match)
        for line in compiled.as_text().splitlines()
        if (match := _INSTRUCTION.search(line))
    )


def _collective(match: re.Match[str]) -> Collective:
    arrays = list(_ARRAY.finditer(match["type"]))
    if match["start"] and match["kind"] != "all-reduce":
        # The type of an instruction that starts a collective lists operands before results.
        arrays = arrays[len(arrays) // 2 :]
    shapes = tuple(tuple(map(int, filter(None, array["shape"].split(",")))) for array in arrays)
    num_bytes = sum(
        math.prod(shape) * int(array["bits"] or 8) // 8
        for shape, array in zip(shapes, arrays, strict=True)
    )
    return Collective(match["kind"], shapes, num_bytes)
