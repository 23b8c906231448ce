"""Checkpoints: the backward pass recomputes what the forward pass did not keep."""

import functools
from collections.abc import Callable
from typing import Any, overload

import jax

from ..._missing import MISSING
from ..._module import field
from ..._partition import UNTRACED, Rest, split
from .._eval_shape import refuse_references
from .._signatures import Output, Params, TransformedFunction, check_callable


class _CheckpointFunction(TransformedFunction):
    """The function that `filter_checkpoint` returns."""

    _prevent_cse: bool = field(static=True)
    _policy: Callable[..., bool] | None = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = FlatCall(self._function, args, kwargs, "a checkpointed function")
        checkpointed = jax.checkpoint(
            call.of_arrays, prevent_cse=self._prevent_cse, policy=self._policy
        )
        return call.output(checkpointed(call.arrays))


@overload
def filter_checkpoint(
    *, prevent_cse: bool = True, policy: Callable[..., bool] | None = None
) -> Callable[[Callable[Params, Output]], Callable[Params, Output]]: ...
@overload
def filter_checkpoint(
    fun: Callable[Params, Output],
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Callable[Params, Output]: ...
def filter_checkpoint(
    fun: Callable[..., Any] = MISSING,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Any:
    """Makes the backward pass of a function recompute its intermediate values.

    This saves memory and costs time. It is `jax.checkpoint` for functions of any arguments: arrays
    are traced, everything else is passed unchanged.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree. Without it, a decorator is
      returned.
    - `prevent_cse`: whether to prevent the compiler from merging the two computations, which would
      undo the saving. Not needed inside `jax.lax.scan`.
    - `policy`: which values to keep: one of `jax.checkpoint_policies`.

    **Returns:** a function of the same arguments with the same output.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> @eqx.filter_checkpoint
        ... def layer(x, activation):
        ...     return activation(activation(x))
        >>> print(eqx.filter_grad(layer)(jnp.array(0.0), jnp.sin))
        1.0
    """
    if fun is MISSING:
        return functools.partial(filter_checkpoint, prevent_cse=prevent_cse, policy=policy)
    check_callable(fun, "filter_checkpoint")
    return _CheckpointFunction(fun, prevent_cse, policy)


# --- One call of a function of any arguments, as a function of arrays alone ---


class FlatCall:
    """A call whose arrays pass through a transformation of JAX, and everything else around it.

    - `arrays`: those of the function, if it is a pytree, and of its arguments.
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str
    ) -> None:
        """**Arguments:**

        - `what`: the name of the function, for the error if it returns a reference.
        """
        self.arrays, self._call = split((function, args, kwargs))
        self._output: Rest = UNTRACED
        self._what = what

    def of_arrays(self, arrays: list[Any]) -> list[Any]:
        """The arrays of the function's output; the rest is kept for `output`."""
        function, args, kwargs = self._call.merge(arrays)
        returned = refuse_references(function(*args, **kwargs), self._what)
        output_arrays, self._output = split(returned)
        return output_arrays

    def output(self, arrays: list[Any]) -> Any:
        """The output of the function, with these arrays instead of its own."""
        return self._output.merge(arrays)
