"""Recurrent cells: one step, from an input and a hidden state to the next hidden state."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._check_numbers import whole_number
from .._dtypes import parameter_dtype
from .._module import Module, field
from .._pytree import tree_pformat
from ._inputs import check_input, check_not_stacked, describe
from ._linear import apply_weight
from ._parameters import Initializer, Parameter, draw, fan_in_limit


def _parameters(
    num_gates: int,
    input_size: int,
    hidden_size: int,
    use_bias: bool,
    dtype: Any,
    weight_init: Initializer | None,
    bias_init: Initializer | None,
) -> tuple[Parameter | None, ...]:
    """Input weight, hidden weight and bias of all gates, one below the other; and a bias of one."""
    rows = num_gates * hidden_size
    dtype, limit = parameter_dtype(dtype), fan_in_limit(hidden_size)
    return (
        Parameter((rows, input_size), dtype, limit, weight_init, inputs_last=True),
        Parameter((rows, hidden_size), dtype, limit, weight_init, inputs_last=True),
        Parameter((rows,), dtype, limit, bias_init) if use_bias else None,
        Parameter((hidden_size,), dtype, limit, bias_init) if use_bias else None,
    )


class GRUCell(Module):
    """One step of a gated recurrent unit.

    Cho, van Merriënboer, Gulcehre, Bahdanau, Bougares, Schwenk & Bengio (2014), "Learning Phrase
    Representations using RNN Encoder-Decoder", with the reset gate after the product, as cuDNN and
    PyTorch have it:

        r = sigmoid(W_r x + b_r + U_r h)
        z = sigmoid(W_z x + b_z + U_z h)
        n = tanh(W_n x + b_n + r * (U_n h + bias_n))
        h' = n + z * (h - n)

    Rows of the weights are the gates r, z, n. Parameters start uniform on `(-1/sqrt(hidden_size),
    1/sqrt(hidden_size))`.

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
        - `dtype`: of the parameters; JAX's default float if `None`.
        - `weight_init`, `bias_init`: instead of the uniform draw, one of `jax.nn.initializers` or a
          function of your own, called with `(inputs, 3 * hidden_size)` for a weight.
        - `key`: for the initial parameters.

        **Raises:** `ValueError` for a size that is not a non-negative integer.
        """
        input_size = whole_number(input_size, "input_size", least=0)
        hidden_size = whole_number(hidden_size, "hidden_size", least=0)
        options = use_bias, dtype, weight_init, bias_init
        self.weight_ih, self.weight_hh, self.bias, self.bias_n = draw(
            key, *_parameters(3, input_size, hidden_size, *options)
        )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.use_bias = use_bias

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
        - `key`: ignored; layers share one signature.

        **Returns:** the next hidden state, shape `(hidden_size,)`.

        **Raises:** `ValueError` if one of them has another shape.
        """
        del key
        check_input(self, input, (self.input_size,), "input")
        check_not_stacked(self, self.weight_ih, 2)
        check_input(self, hidden, (self.hidden_size,), "hidden")
        of_input, of_hidden = (
            apply_weight(self.weight_ih, input),
            apply_weight(self.weight_hh, hidden),
        )
        if self.bias is not None:
            of_input = of_input + self.bias
        r_input, z_input, n_input = jnp.split(of_input, 3)
        r_hidden, z_hidden, n_hidden = jnp.split(of_hidden, 3)
        if self.bias_n is not None:
            n_hidden = n_hidden + self.bias_n
        reset = jax.nn.sigmoid(r_input + r_hidden)
        update = jax.nn.sigmoid(z_input + z_hidden)
        new = jnp.tanh(n_input + reset * n_hidden)
        return new + update * (hidden - new)


class LSTMCell(Module):
    """One step of a long short-term memory.

    Hochreiter & Schmidhuber (1997), "Long Short-Term Memory", with the forget gate of Gers,
    Schmidhuber & Cummins (2000), "Learning to Forget":

        i, f, o = sigmoid(W_{i,f,o} x + U_{i,f,o} h + b_{i,f,o})
        g = tanh(W_g x + U_g h + b_g)
        c' = f * c + i * g
        h' = o * tanh(c')

    Rows of the weights are the gates i, f, g, o. Parameters start uniform on
    `(-1/sqrt(hidden_size), 1/sqrt(hidden_size))`.

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
        - `hidden_size`: length of the hidden state, and of the memory.
        - `use_bias`: whether the gates have biases.
        - `dtype`: of the parameters; JAX's default float if `None`.
        - `weight_init`, `bias_init`: instead of the uniform draw, one of `jax.nn.initializers` or a
          function of your own, called with `(inputs, 4 * hidden_size)` for a weight.
        - `key`: for the initial parameters.

        **Raises:** `ValueError` for a size that is not a non-negative integer.
        """
        input_size = whole_number(input_size, "input_size", least=0)
        hidden_size = whole_number(hidden_size, "hidden_size", least=0)
        options = use_bias, dtype, weight_init, bias_init
        self.weight_ih, self.weight_hh, self.bias = draw(
            key, *_parameters(4, input_size, hidden_size, *options)[:3]
        )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.use_bias = use_bias

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
        - `key`: ignored; layers share one signature.

        **Returns:** the next pair, of the same shapes.

        **Raises:** `ValueError` if one of them has another shape, or `hidden` is no pair.
        """
        del key
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
