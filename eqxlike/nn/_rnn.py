"""Recurrent cells, and a layer that applies a cell to a sequence."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped

from .._check_numbers import whole_number
from .._compat import vary, varying_axes
from .._dtypes import parameter_dtype
from .._module import Module, field
from .._pytree import tree_pformat
from ._inputs import as_data, check_input, check_layer, check_not_stacked, describe, key_for
from ._linear import apply_weight
from ._parameters import Initializer, Parameter, draw, fan_in_limit


def _parameters(
    cell: "GRUCell | LSTMCell",
    num_gates: int,
    dtype: Any,
    weight_init: Initializer | None,
    bias_init: Initializer | None,
) -> tuple[Parameter | None, ...]:
    """Returns the input weight, the hidden weight, the bias, and a second bias. All but the second
    bias have the gates along the first axis. The second bias has shape `(hidden_size,)`.
    """
    size = cell.hidden_size
    rows = num_gates * size
    dtype, limit = parameter_dtype(dtype), fan_in_limit(size)
    return (
        Parameter((rows, cell.input_size), dtype, limit, weight_init, is_outputs_first=True),
        Parameter((rows, size), dtype, limit, weight_init, is_outputs_first=True),
        Parameter((rows,), dtype, limit, bias_init) if cell.use_bias else None,
        Parameter((size,), dtype, limit, bias_init) if cell.use_bias else None,
    )


class GRUCell(Module):
    """One step of a gated recurrent unit.

    Cho, van Merriënboer, Gulcehre, Bahdanau, Bougares, Schwenk & Bengio (2014), "Learning Phrase
    Representations using RNN Encoder-Decoder". As in cuDNN and PyTorch, the reset gate `r` is
    applied after the product with `U_n`:

        r = sigmoid(W_r x + b_r + U_r h)
        z = sigmoid(W_z x + b_z + U_z h)
        n = tanh(W_n x + b_n + r * (U_n h + bias_n))
        h' = n + z * (h - n)

    The weights contain the gates in the order r, z, n along the first axis. Parameters are
    initialised from the uniform distribution on `(-1/sqrt(hidden_size), 1/sqrt(hidden_size))`.

    >>> import jax, jax.numpy as jnp
    >>> cell = GRUCell(input_size=3, hidden_size=4, key=jax.random.key(0))
    >>> def step(hidden, x):
    ...     hidden = cell(x, hidden)
    ...     return hidden, hidden
    >>> last, every = jax.lax.scan(step, jnp.zeros(4), jnp.ones((10, 3)))
    >>> last.shape, every.shape
    ((4,), (10, 4))
    """

    weight_ih: Float[Array, "3*hidden_size input_size"]
    weight_hh: Float[Array, "3*hidden_size hidden_size"]
    bias: Float[Array, "3*hidden_size"] | None
    bias_n: Float[Array, " hidden_size"] | None
    input_size: int = field(static=True)
    hidden_size: int = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `input_size`: length of the input.
        - `hidden_size`: length of the hidden state.
        - `use_bias`: whether the gates have biases.
        - `dtype`: dtype of the parameters; JAX's default float if `None`.
        - `weight_init`, `bias_init`: initializers that replace the uniform distribution, from
          `jax.nn.initializers` or any function `init(key, shape, dtype)`. `weight_init` is called
          with the shapes `(input_size, 3 * hidden_size)` and `(hidden_size, 3 * hidden_size)`.
        - `key`: random key for the initial parameters.

        **Raises:** `ValueError` if a size is not an integer of at least 0.
        """
        self.input_size = whole_number(input_size, "input_size", least=0)
        self.hidden_size = whole_number(hidden_size, "hidden_size", least=0)
        self.use_bias = use_bias
        self.weight_ih, self.weight_hh, self.bias, self.bias_n = draw(
            key, *_parameters(self, 3, dtype, weight_init, bias_init)
        )

    def __call__(
        self,
        input: Float[Array, " input_size"],
        hidden: Float[Array, " hidden_size"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " hidden_size"]:
        """**Arguments:**

        - `input`: shape `(input_size,)`.
        - `hidden`: shape `(hidden_size,)`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** the next hidden state, shape `(hidden_size,)`.

        **Raises:** `ValueError` if `input` or `hidden` has another shape.
        """
        check_input(self, input, (self.input_size,), "input")
        check_not_stacked(self, self.weight_ih, 2)
        check_input(self, hidden, (self.hidden_size,), "hidden")
        from_input = apply_weight(self.weight_ih, input)
        if self.bias is not None:
            from_input = from_input + self.bias
        r_input, z_input, n_input = jnp.split(from_input, 3)
        r_hidden, z_hidden, n_hidden = jnp.split(apply_weight(self.weight_hh, hidden), 3)
        if self.bias_n is not None:
            n_hidden = n_hidden + self.bias_n
        reset = jax.nn.sigmoid(r_input + r_hidden)
        update = jax.nn.sigmoid(z_input + z_hidden)
        new = jnp.tanh(n_input + reset * n_hidden)
        return new + update * (hidden - new)


class LSTMCell(Module):
    """One step of a long short-term memory.

    Hochreiter & Schmidhuber (1997), "Long Short-Term Memory", with the forget gate from Gers,
    Schmidhuber & Cummins (2000), "Learning to Forget":

        i, f, o = sigmoid(W_{i,f,o} x + U_{i,f,o} h + b_{i,f,o})
        g = tanh(W_g x + U_g h + b_g)
        c' = f * c + i * g
        h' = o * tanh(c')

    The weights contain the gates in the order i, f, g, o along the first axis. Parameters are
    initialised from the uniform distribution on `(-1/sqrt(hidden_size), 1/sqrt(hidden_size))`.

    >>> import jax, jax.numpy as jnp
    >>> cell = LSTMCell(input_size=3, hidden_size=4, key=jax.random.key(0))
    >>> def step(state, x):
    ...     hidden, memory = cell(x, state)
    ...     return (hidden, memory), hidden
    >>> last, every = jax.lax.scan(step, (jnp.zeros(4), jnp.zeros(4)), jnp.ones((10, 3)))
    >>> last[0].shape, every.shape
    ((4,), (10, 4))
    """

    weight_ih: Float[Array, "4*hidden_size input_size"]
    weight_hh: Float[Array, "4*hidden_size hidden_size"]
    bias: Float[Array, "4*hidden_size"] | None
    input_size: int = field(static=True)
    hidden_size: int = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `input_size`: length of the input.
        - `hidden_size`: length of the hidden state and of the memory.
        - `use_bias`: whether the gates have biases.
        - `dtype`: dtype of the parameters; JAX's default float if `None`.
        - `weight_init`, `bias_init`: initializers that replace the uniform distribution, from
          `jax.nn.initializers` or any function `init(key, shape, dtype)`. `weight_init` is called
          with the shapes `(input_size, 4 * hidden_size)` and `(hidden_size, 4 * hidden_size)`.
        - `key`: random key for the initial parameters.

        **Raises:** `ValueError` if a size is not an integer of at least 0.
        """
        self.input_size = whole_number(input_size, "input_size", least=0)
        self.hidden_size = whole_number(hidden_size, "hidden_size", least=0)
        self.use_bias = use_bias
        self.weight_ih, self.weight_hh, self.bias = draw(
            key, *_parameters(self, 4, dtype, weight_init, bias_init)[:3]
        )

    def __call__(
        self,
        input: Float[Array, " input_size"],
        hidden: tuple[Float[Array, " hidden_size"], Float[Array, " hidden_size"]],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " hidden_size"], Float[Array, " hidden_size"]]:
        """**Arguments:**

        - `input`: shape `(input_size,)`.
        - `hidden`: the pair (hidden state, memory), both of shape `(hidden_size,)`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** the next pair, of the same shapes.

        **Raises:**

        - `ValueError` if `input` or an array in `hidden` has another shape.
        - `ValueError` if `hidden` is not a pair.
        """
        try:
            h, c = hidden
        except (TypeError, ValueError):
            raise ValueError(
                f"{describe(self)} expected hidden to be a pair, (hidden state, memory), got "
                f"{tree_pformat(hidden)}."
            ) from None
        check_input(self, input, (self.input_size,), "input")
        check_not_stacked(self, self.weight_ih, 2)
        check_input(self, h, (self.hidden_size,), "hidden[0]")
        check_input(self, c, (self.hidden_size,), "hidden[1]")
        gates = apply_weight(self.weight_ih, input) + apply_weight(self.weight_hh, h)
        if self.bias is not None:
            gates = gates + self.bias
        i, f, g, o = jnp.split(gates, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


# --- A cell applied to a sequence ---


class RNN(Module):
    """A recurrent layer: applies a cell to each input of a sequence with `jax.lax.scan`.

    The output of each step is the new state. If the state is a tuple, as for an `LSTMCell`, the
    output is the first element of the state. For a batch write `jax.vmap(rnn)(xs)`.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> forward = nn.RNN(nn.LSTMCell(3, 4, key=key1))
    >>> outputs, (hidden, memory) = forward(jnp.ones((10, 3)))
    >>> outputs.shape, hidden.shape
    ((10, 4), (4,))

    A bidirectional RNN consists of two layers:

    >>> backward = nn.RNN(nn.LSTMCell(3, 4, key=key2), reverse=True)
    >>> def both(xs, length=None):
    ...     outputs = forward(xs, length=length)[0], backward(xs, length=length)[0]
    ...     return jnp.concatenate(outputs, axis=-1)
    >>> both(jnp.ones((10, 3)), length=7).shape
    (10, 8)
    """

    cell: Callable[..., Any]
    reverse: bool = field(static=True)

    def __init__(self, cell: Callable[..., Any], *, reverse: bool = False):
        """**Arguments:**

        - `cell`: an `LSTMCell`, a `GRUCell`, or any function `cell(x, state)` that returns the next
          state. The state is a pytree of arrays whose shapes and dtypes stay the same. A cell that
          takes a `key` gets a new key in each step.
        - `reverse`: whether to process the sequence from the last input to the first. Output `i`
          still belongs to input `i`.

        **Raises:** `TypeError` for a cell that is not a function.
        """
        check_layer(cell, "RNN: cell")
        self.cell = cell
        self.reverse = reverse

    def __call__(
        self,
        xs: Shaped[Array, "sequence ..."],
        state: PyTree = None,
        *,
        length: int | Int[Array, ""] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Shaped[Array, "sequence ..."], PyTree]:
        """**Arguments:**

        - `xs`: the inputs, shape `(sequence, input_size)`; for a custom cell `(sequence, ...)`.
        - `state`: initial state; zeros if `None`. Required for a custom cell.
        - `length`: number of inputs before the padding. The padding leaves the state unchanged, and
          the outputs for the padding are zero. With `reverse` the first input is `xs[length - 1]`.
        - `key`: random key, split into one key for each step.

        **Returns:** the outputs of all steps, stacked along the first axis, and the final state.

        **Raises:**

        - `ValueError` if `xs` or `length` has another shape.
        - `TypeError` if `length` is not an integer.
        - `TypeError` if `cell` is a custom cell and `state` is missing.
        """
        cell = self.cell
        is_own = isinstance(cell, GRUCell | LSTMCell)
        check_input(self, xs, ("sequence", cell.input_size) if is_own else ("sequence", "..."))
        if state is None:
            state = self._initial_state(xs)
        if length is not None:
            check_input(self, length, (), "length")
            if not jnp.issubdtype(jnp.result_type(length), jnp.integer):
                raise TypeError(
                    f"{describe(self)} expected length to be an integer, got {length!r}."
                )
        keys, key_of = as_data(None if key is None else jr.split(key, len(xs)))

        def step(state: Any, row: Any) -> tuple[Any, Any]:
            x, index, data = row
            new = cell(x, state, **key_for(cell, key_of(data)))
            if length is not None:
                choose = functools.partial(jnp.where, index < length)
                new = jtu.tree_map(choose, new, state)
                return new, jtu.tree_map(lambda y: choose(y, jnp.zeros_like(y)), _output(new))
            return new, _output(new)

        indices = None if length is None else jnp.arange(len(xs))
        state, outputs = jax.lax.scan(step, state, (xs, indices, keys), reverse=self.reverse)
        return outputs, state

    def _initial_state(self, xs: Array) -> PyTree:
        cell = self.cell
        if not isinstance(cell, GRUCell | LSTMCell):
            raise TypeError(
                f"{describe(self)} has a default initial state only for an LSTMCell or a GRUCell; "
                f"its cell is {type(cell).__name__}. Pass the state: `rnn(xs, state)`."
            )
        dtype = jnp.result_type(xs, cell.weight_hh)
        zeros = vary(jnp.zeros(cell.hidden_size, dtype), varying_axes(xs))
        return zeros if isinstance(cell, GRUCell) else (zeros, zeros)


def _output(state: Any) -> Any:
    return state[0] if isinstance(state, tuple) else state
