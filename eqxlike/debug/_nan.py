"""Detection of NaN in the backward pass."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from .. import branched_error_if, tree_pformat
from .._dtypes import without_key_dtype
from ..extend import Rest, has_tangent, split


def backward_nan(x: PyTree, name: Any = None, terminate: bool = True) -> PyTree:
    """Returns `x`; in the backward pass, prints the cotangents of `x` and raises if they have NaN.

    The values of `x` (the primals) are printed too. Under `jax.vmap`, primals and cotangents are
    printed once for each member of the batch. Forward passes print nothing.

    **Arguments:**

    - `x`: any pytree. The printed cotangent of a leaf that is not differentiated is `None`.
    - `name`: if not `None`, it is printed above the values.
    - `terminate`: whether to raise an error, by `eqxlike.error_if`, if a cotangent has NaN.

    **Returns:** `x`.

    **Raises:** in the backward pass, the error of `eqxlike.error_if` if a cotangent has NaN. The
    message has the path, in `x`, of the first leaf with such a cotangent.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> def norm(x):
        ...     square = eqx.debug.backward_nan(jnp.sum(x**2), name="square", terminate=False)
        ...     return jnp.where(square > 0, jnp.sqrt(square), 0.0)
        >>> gradient = jax.grad(norm)(jnp.zeros(2))
        square:
           primals=Array(0., dtype=float32)
        cotangents=Array(nan, dtype=float32)
               NaN in cotangents
    """
    arrays, rest = split(x)
    code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
    called_at = f"{code.co_filename}:{line} in {code.co_qualname}"

    @jax.custom_jvp
    def identity(arrays: list[Array]) -> list[Array]:
        return arrays

    def push_forward(primals: Any, tangents: Any) -> tuple[list[Array], list[Any]]:
        ((arrays,), (tangents,)) = primals, tangents
        # Primals and tangents may be Python numbers.
        tangents = [
            each if isinstance(each, SymbolicZero) else jnp.asarray(each) for each in tangents
        ]
        differentiated = [n for n, tangent in enumerate(tangents) if has_tangent(tangent)]
        shown = [without_key_dtype(jnp.asarray(array)) for array in arrays]
        cotangent_check = _CotangentCheck(
            name, called_at, terminate, rest, len(arrays), differentiated
        )
        watched = _check_p.bind(
            *shown,
            *(tangents[number] for number in differentiated),
            num_primals=len(shown),
            check=cotangent_check.check,
        )
        for number, tangent in zip(differentiated, watched, strict=True):
            tangents[number] = tangent
        return identity(arrays), tangents

    identity.defjvp(push_forward, symbolic_zeros=True)
    return rest.merge(identity(arrays))


# --- The identity whose transpose checks the cotangents ---


Cotangents = list[Array | None]
Check = Callable[[list[Array], Cotangents], Cotangents]

# The operands are primals, followed by tangents. The primitive returns the tangents unchanged. Its
# transpose returns `check(primals, cotangents)`. Unlike a function with `jax.custom_vjp`, the
# primitive also supports forward mode.
_check_p = Primitive("backward_nan")
_check_p.multiple_results = True


@_check_p.def_impl
@_check_p.def_abstract_eval
def _tangents(*operands: Any, num_primals: int, check: Check) -> list[Any]:
    return list(operands[num_primals:])


def _push_forward(operands: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    num_primals = params["num_primals"]
    second = map(ad.instantiate_zeros, tangents[num_primals:])
    again = _check_p.bind(*operands[:num_primals], *second, **params)
    return _check_p.bind(*operands, **params), again


def _pull_back(
    cotangents: Any, *operands: Any, num_primals: int, check: Check
) -> list[Array | None]:
    # A symbolic zero need not be checked.
    nonzero = [None if type(each) is ad.Zero else each for each in cotangents]
    return [None] * num_primals + check([*operands[:num_primals]], nonzero)


def _batch(
    operands: Any, axes: Any, *, num_primals: int, check: Check
) -> tuple[list[Array], list[int]]:
    pairs = zip(operands, axes, strict=True)
    size = next(operand.shape[axis] for operand, axis in pairs if axis is not None)
    # Batch all operands, because it is not known yet which cotangents will be batched.
    batched = [
        jnp.broadcast_to(operand, (size, *operand.shape))
        if axis is None
        else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    tangents = _check_p.bind(*batched, num_primals=num_primals, check=jax.vmap(check))
    return tangents, [0] * len(tangents)


ad.primitive_jvps[_check_p] = _push_forward
ad.primitive_transposes[_check_p] = _pull_back
batching.primitive_batchers[_check_p] = _batch
mlir.register_lowering(_check_p, mlir.lower_fun(_tangents, multiple_results=True))


@dataclasses.dataclass(frozen=True, eq=False)
class _CotangentCheck:
    """The check of the cotangents of one call of `backward_nan`.

    - `called_at`: the line of the call in the user's program.
    - `rest`: the tree without its arrays.
    - `num_arrays`: the number of arrays in the tree.
    - `differentiated`: the indices of the arrays that have a cotangent.
    """

    name: Any
    called_at: str
    terminate: bool
    rest: Rest
    num_arrays: int
    differentiated: list[int]

    def check(self, primals: list[Array], cotangents: Cotangents) -> Cotangents:
        # Callbacks cannot be differentiated, so they get stopped gradients. The returned
        # `cotangents` stay differentiable.
        shown = jax.lax.stop_gradient((primals, cotangents))
        if not self.terminate:
            jax.debug.callback(self._print, *shown)
            return cotangents
        # The error depends on the output of the callback. So the callback prints before the error
        # is raised.
        place = jax.ShapeDtypeStruct((), jnp.int32)
        first = jax.pure_callback(self._print_and_find, place, *shown, vmap_method="sequential")
        return branched_error_if(cotangents, first >= 0, jnp.maximum(first, 0), self._messages())

    def _print_and_find(self, primals: list[Any], cotangents: list[Any]) -> np.ndarray:
        """Prints the values. Returns the index of the first cotangent with NaN, or -1."""
        self._print(primals, cotangents)
        has_nan = [_has_nan(cotangent) for cotangent in cotangents]
        return np.array(has_nan.index(True) if any(has_nan) else -1, np.int32)

    def _print(self, primals: list[Any], cotangents: list[Any]) -> None:
        of_all: list[Any] = [None] * self.num_arrays
        for number, cotangent in zip(self.differentiated, cotangents, strict=True):
            of_all[number] = cotangent
        lines = [
            f"   primals={_show(self.rest.merge(primals))}",
            f"cotangents={_show(self.rest.merge_into(None, of_all))}",
            *(
                f"       NaN in cotangents{path}{_locate_nan(cotangent)}"
                for path, cotangent in zip(self._paths(), cotangents, strict=True)
                if _has_nan(cotangent)
            ),
        ]
        if self.name is not None:
            lines.insert(0, f"{self.name}:")
        print("\n".join(lines))

    def _messages(self) -> list[str]:
        """The error message for each cotangent."""
        name = "x" if self.name is None else self.name
        return [
            f"`backward_nan` found NaN in the cotangent of {name}{path}, which is printed above. "
            f"It was called at {self.called_at}. The NaN comes from the derivative of an operation "
            f"after this call: move `backward_nan` to values that are computed from {name} to "
            "find it."
            for path in self._paths()
        ]

    def _paths(self) -> list[str]:
        """The paths of the arrays that have a cotangent."""
        paths = jtu.tree_leaves_with_path(self.rest.merge_into(None, range(self.num_arrays)))
        return [jtu.keystr(paths[number][0]) for number in self.differentiated]


def _has_nan(array: Any) -> bool:
    return array is not None and bool(np.isnan(np.asarray(array)).any())


def _locate_nan(array: Any) -> str:
    is_nan = np.isnan(np.asarray(array))
    if is_nan.ndim == 0:
        return ""
    first = [int(index) for index in np.argwhere(is_nan)[0]]
    return f": {is_nan.sum()} of {is_nan.size} elements, the first at {first}"


def _show(tree: PyTree) -> str:
    return tree_pformat(tree, short_arrays=False)
