"""What to do where a mode meets an operation that it cannot differentiate."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

_ANY_FUNCTION = (
    "`ad.FiniteDifference()` differentiates any function, and `ad.differentiate_with(part, "
    "ad.FiniteDifference())` this part alone"
)

# What JAX says (0.10.2 to 0.12.0.1), and what to say beside it.
_ADVICE = (
    (
        r"Reverse-mode differentiation does not work for lax\.while_loop",
        "`jax.lax.while_loop`, and `fori_loop` with traced bounds, have no reverse mode, since "
        "nobody knows how much to keep. Use `ad.Forward()`, or the loops of `eqxlike.loops` with "
        '`kind="checkpointed"` or `kind="bounded"`.',
    ),
    (
        r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp",
        "A `jax.custom_vjp` has a reverse mode alone. Use `ad.Reverse()`, or wrap that part as "
        "`ad.differentiate_with(part, ad.Reverse())`, which has both.",
    ),
    (
        r"(Pure|IO) callbacks do not support JVP",
        f"JAX does not see into a callback. {_ANY_FUNCTION}; `filter_custom_jvp` takes a rule of "
        "your own.",
    ),
    (
        r"Differentiation rule for '(?P<operation>.*)' not implemented",
        "The operation `{operation}` has no derivative in JAX. " + _ANY_FUNCTION + ".",
    ),
    (
        r"Transpose rule .* for '(?P<operation>.*)' not implemented",
        "The operation `{operation}` has no reverse mode in JAX: use `ad.Forward()`. Or, in the "
        "backward rule of a `jax.custom_vjp`, it is not linear: use `ad.Reverse()` alone.",
    ),
    (
        r"vmapped value on an unbatched array reference",
        "What the function writes to a reference cannot be mapped over several directions at once. "
        "Use `ad.Reverse()` or `ad.Checkpointed()`, which evaluate the function once.",
    ),
    (
        r"Batching rule for '(?P<operation>.*)' not implemented"
        r"|vmap is only supported for the (?P<callback>\w+) primitive when vmap_method",
        "The operation `{operation}` cannot be mapped with `jax.vmap`. A callback can, with "
        '`vmap_method="sequential"`. Where no `vmap` of yours is the cause, but that of '
        "`ad.Forward` over its directions, `ad.Forward(chunk=1)` takes them one at a time.",
    ),
)


@contextlib.contextmanager
def advised(mode: Any, name: str | None) -> Iterator[None]:
    """Adds a note to an error of JAX's inside that says what the mode cannot do, and what can.

    **Arguments:**

    - `name`: that of the function; where `None`, a caller knows more, and adds the note.
    """
    try:
        yield
    except Exception as error:
        if name is not None:
            advise(error, mode, name)
        raise


def advise(error: Exception, mode: Any, name: str) -> None:
    """Adds the note to `error`, where there is something to say and nobody has said it."""
    start = "This was while "
    if any(note.startswith(start) for note in getattr(error, "__notes__", ())):
        return
    for pattern, advice in _ADVICE:
        if found := re.search(pattern, str(error)):
            operation = next((each for each in found.groupdict().values() if each), "")
            advice = advice.replace("{operation}", operation)
            by = "by reverse mode" if mode is None else f"by {mode!r}"
            error.add_note(f"{start}{name} was differentiated {by}. {advice}")
            return
