"""Sparse Jacobians and Hessians: as many products as there are colours, not columns."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from .._compat import Tracer
from .._partition import split
from .._pytree import is_inexact_array
from .._transforms._derivatives._by_mode import checked_value
from .._transforms._signatures import Params, check_callable, value_and_aux

_Kind = Literal["jacobian", "hessian"]


def sparse_jacobian(fun: Callable[Params, Any], *, has_aux: bool = False) -> Callable[Params, Any]:
    """The Jacobian of a function whose outputs each depend on few inputs, as a sparse matrix.

    The library asdex (`pip install 'eqxlike[sparse]'`) reads off the traced function which output
    may depend on which input, and colours the columns, or rows, so that those of one colour share
    no entry; one Jacobian-vector, or vector-Jacobian, product serves a colour (Gebremedhin, Manne
    and Pothen, 2005). A tridiagonal Jacobian of any size takes three.

    The structure is sought when the function is traced: call the result under `filter_jit`, and it
    is found once. Of arrays that are traced then, the shapes alone are known; an index among them
    may make the structure denser.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated. Then a pair `(matrix, aux)` is returned.

    **Returns:** a function of the same arguments that returns a `jax.experimental.sparse.BCOO` of
    shape `(m, n)`. Its columns are the `n` numbers in the floating-point arrays of the first
    argument, and its rows the `m` numbers in those of the value, leaf after leaf.

    **Raises:** `ImportError` if asdex is not installed; when called, `TypeError` if an array is
    complex, or arrays of the first argument differ in dtype.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> differences = lambda x: (x[1:] - x[:-1]) ** 2
        >>> jacobian = jax.jit(ad.sparse_jacobian(differences))(jnp.arange(4.0))
        >>> print(jacobian.nse, jacobian.shape)
        6 (3, 4)
        >>> print(jacobian.todense())
        [[-2.  2.  0.  0.]
         [ 0. -2.  2.  0.]
         [ 0.  0. -2.  2.]]
    """
    return _sparse(fun, "jacobian", has_aux)


def sparse_hessian(fun: Callable[Params, Any], *, has_aux: bool = False) -> Callable[Params, Any]:
    """The Hessian of a scalar function whose inputs interact with few others, as a sparse matrix.

    It is found as in `sparse_jacobian`, with forward over reverse mode and a colouring that uses
    the symmetry.

    **Arguments:**

    - `fun`: a function of any arguments that returns a real floating-point scalar.
    - `has_aux`: as for `sparse_jacobian`.

    **Returns:** a function of the same arguments that returns a `jax.experimental.sparse.BCOO` of
    shape `(n, n)`, over the `n` numbers in the floating-point arrays of the first argument, leaf
    after leaf.

    **Raises:** as `sparse_jacobian`; when called, `TypeError` if the value is not a real scalar.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> energy = lambda x: jnp.sum((x[1:] - x[:-1]) ** 2)
        >>> print(jax.jit(ad.sparse_hessian(energy))(jnp.arange(3.0)).todense())
        [[ 2. -2.  0.]
         [-2.  4. -2.]
         [ 0. -2.  2.]]
    """
    return _sparse(fun, "hessian", has_aux)


def _sparse(fun: Any, kind: _Kind, has_aux: bool) -> Callable[..., Any]:
    name = f"ad.sparse_{kind}"
    check_callable(fun, name)
    asdex = _asdex(name)

    def matrix(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        arrays, rest = split(x, is_inexact_array)
        vector, unravel = _ravel(arrays, name)
        # Traced arrays become inputs. The values of the others are known, indices for one.
        traced, others_rest = split((args, kwargs), lambda leaf: isinstance(leaf, Tracer))

        def of_vector(vector: Array, traced: list[Array]) -> Array:
            args, kwargs = others_rest.merge(traced)
            output = fun(rest.merge(unravel(vector)), *args, **kwargs)
            value, _ = value_and_aux(output, has_aux, fun)
            if kind == "hessian":
                return checked_value(value, False, getattr(fun, "__name__", "the function"))
            outputs, _ = split(value, is_inexact_array)
            return _ravel(outputs, name)[0]

        # What `fun` closes over may be traced too.
        closed = jax.make_jaxpr(of_vector)(vector, traced)
        hidden, consts_rest = split(closed.consts, lambda leaf: isinstance(leaf, Tracer))

        def of_all(vector: Array, inputs: list[Array]) -> Array:
            consts = consts_rest.merge(inputs[: len(hidden)])
            run = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))
            return run(vector, *inputs[len(hidden) :])[0]

        inputs = [*hidden, *traced]
        example = np.zeros(vector.shape, vector.dtype), [np.zeros(a.shape, a.dtype) for a in inputs]
        try:
            found = getattr(asdex, f"{kind}_sparsity")(of_all, *example, argnums=0)
        except Exception as error:
            if "asdex" in str(error):
                error.add_note(
                    f"`{name}` leaves it to asdex to find the structure, which cannot do this "
                    f"function. `ad.{kind}` does without one."
                )
            raise
        # Of the vector alone: asdex 0.5.2 does not differentiate where other inputs are integers.
        struct = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
        pattern = asdex.SparsityPattern.from_coo(
            found.rows, found.cols, found.shape, input_avals=(struct,)
        )
        with warnings.catch_warnings():
            # That a matrix is dense is no reason to warn where one asked for it.
            warnings.simplefilter("ignore", asdex.DenseColoringWarning)
            colored = getattr(asdex, f"{kind}_coloring_from_sparsity")(pattern)
        of_colors = getattr(asdex, f"{kind}_from_coloring")
        found = of_colors(lambda vector: of_all(vector, inputs), colored)(vector)
        if not has_aux:
            return found
        return found, value_and_aux(fun(x, *args, **kwargs), has_aux, fun)[1]

    return matrix


def _asdex(name: str) -> Any:
    try:
        return importlib.import_module("asdex")
    except ImportError as error:  # asdex 0.5.2 imports what jax 0.12.0.1 no longer has.
        raise ImportError(
            f"`{name}` needs the library asdex, in a version that runs with jax {jax.__version__}: "
            f"`pip install -U 'eqxlike[sparse]'`. {error}"
        ) from error


def _ravel(arrays: list[Array], name: str) -> tuple[Array, Any]:
    dtypes = {str(jnp.result_type(each)) for each in arrays}
    if len(dtypes) > 1 or any(map(jnp.iscomplexobj, arrays)):
        raise TypeError(
            f"`{name}` needs real arrays of one dtype in what is differentiated, and in the value; "
            f"got {', '.join(sorted(dtypes))}."
        )
    if not arrays:
        raise ValueError(f"`{name}` found no floating-point array to differentiate.")
    return ravel_pytree(list(map(jnp.asarray, arrays)))
