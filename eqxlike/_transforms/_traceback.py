"""Tracebacks in which the user's lines stand without ours between them."""

import os
import types

import jax

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_HERE)
_OURS = (
    "<eqxlike ",  # Generated code.
    *(os.path.join(_PACKAGE, name, "") for name in ("_module", "_partition", "_transforms")),
)


def hide_our_frames(error: BaseException) -> None:
    """Takes the frames of dispatch and generated code out of the traceback of `error`.

    As JAX does with its own, and like them they stay if `jax_traceback_filtering` is `"off"`.
    """
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    entries = []
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_OURS):
            entries.append(entry)
        entry = entry.tb_next
    kept: types.TracebackType | None = None
    for entry in reversed(entries):
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = kept
