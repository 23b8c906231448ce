"""Tracebacks: they show the source of generated functions, and hide frames of this package.

The last functions explain errors of Python and JAX.
"""

import collections
import contextlib
import difflib
import inspect
import itertools
import linecache
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.tree_util as jtu

from ._compat import Tracer, register_exclusion

_serial = itertools.count()
_collected: collections.deque[str] = collections.deque()
"""File names of generated functions that were garbage-collected, for `forget_sources`.

The sources are not removed from `linecache` at once, since garbage collection may happen while
`linecache` iterates over its cache. Removing an entry at that moment would raise a `KeyError` in
`linecache`.
"""


def tuple_of(parts: Iterable[str]) -> str:
    """The Python source of a tuple of these expressions."""
    return "(" + "".join(f"{part}, " for part in parts) + ")"


def forget_sources() -> None:
    """Removes the sources of garbage-collected functions from `linecache`."""
    # `while _collected` alone is not enough, since another thread may take the last name.
    with contextlib.suppress(IndexError):
        while True:
            linecache.cache.pop(_collected.popleft(), None)


def compile_function(lines: Iterable[str], namespace: dict[str, Any], origin: str) -> Callable:
    """Compiles `lines`, which define one function, and returns that function.

    **Arguments:**

    - `lines`: the source, without line ends; the first line is the `def`.
    - `namespace`: the globals of the function. They are copied.
    - `origin`: the purpose of the function, shown as the file name `<eqxlike ORIGIN>`.

    The source stays in `linecache` until the function is garbage-collected and another function is
    compiled.
    """
    forget_sources()
    source = "\n".join(lines) + "\n"
    filename = f"<eqxlike {origin} #{next(_serial)}>"
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)
    name = source[len("def ") : source.index("(")]
    function = scope.pop(name)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(function, _collected.append, filename)
    return function


def replace_body(function: Any, by: Any) -> Any:
    """Gives `function` the code of `by`, and returns `function`.

    Both functions must come from `compile_function`.
    """
    function.__globals__.update(by.__globals__)
    function.__code__ = by.__code__
    vars(function)["source"] = by  # Keeps the source of the new code in `linecache`.
    return function


# --- Frames of this package in tracebacks and warnings ---


_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_OURS = (
    "<eqxlike ",  # Generated code.
    os.path.join(_PACKAGE, "_compat.py"),
    *(os.path.join(_PACKAGE, name, "") for name in ("_module", "_partition", "_transforms")),
)
_NOT_OF_USER = (
    "<eqxlike ",
    os.path.join(_PACKAGE, ""),
    os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), ""),
)

# With our files excluded, `jax.debug.breakpoint` stops in the innermost frame of the user.
for _path in _OURS:
    register_exclusion(_path)


def hide_our_frames(error: BaseException) -> None:
    """Removes the frames of dispatch and generated code from the traceback of `error`.

    If `jax_traceback_filtering` is `"off"`, no frames are removed, neither ours nor JAX's.
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


def is_of_user(file_name: str) -> bool:
    """Whether a file belongs to neither this package nor JAX."""
    return not file_name.startswith(_NOT_OF_USER)


def is_of_user_or_layer(file_name: str) -> bool:
    """Whether a file belongs to neither this package nor JAX, or belongs to `eqxlike.nn`."""
    return is_of_user(file_name) or file_name.startswith(os.path.join(_PACKAGE, "nn", ""))


def frame_of_user(source: Any, is_wanted: Callable[[str], bool] = is_of_user) -> Any:
    """The innermost frame whose file `is_wanted` accepts, in JAX's `source_info` of an operation.

    Returns `None` if there is no such frame. Operations in `jax.numpy` may have no such frame,
    since JAX caches the traces of its functions.
    """
    traceback = getattr(source, "traceback", None)
    frames = () if traceback is None else traceback.frames
    return next((frame for frame in frames if is_wanted(frame.file_name)), None)


def stacklevel_of_user() -> int:
    """The `stacklevel` that the caller must pass to `warnings.warn` to show the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_OF_USER):
        level, frame = level + 1, frame.f_back
    return level


def name_tracers(error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Adds the paths of tracers in the arguments to JAX's `error` about a leaked tracer."""
    paths = [
        f"args{jtu.keystr(path)}"
        for path, leaf in jtu.tree_leaves_with_path((*args, kwargs) if kwargs else args)
        if isinstance(leaf, Tracer)
    ]
    if paths:
        error.add_note(
            f"Tracers among the arguments: {', '.join(paths)}. A tracer cannot be used after its "
            "trace: do not store it in a Module, or anywhere else outside of the traced function."
        )


def explain_signature(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Says how to call `name`, if the arguments do not fit its signature."""
    parameters = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else ...
        )
        for each in signature.parameters.values()
    ]
    shown = str(inspect.Signature(parameters)).replace("=Ellipsis", "=...")
    text = f"Write `{name}{shown}`."
    # The initials of a name, such as `lr` for `learning_rate`, also suggest the name.
    names = {"".join(re.findall("(?:^|_)(.)", each)): each for each in signature.parameters}
    names |= {each: each for each in signature.parameters}
    for unknown in [each for each in kwargs if each not in signature.parameters]:
        for near in difflib.get_close_matches(unknown, names, 1):
            text += f" Did you mean `{names[near]}` instead of `{unknown}`?"
    by_name = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    missing = [each.name for each in by_name if each.default is each.empty]
    num_by_place = len(parameters) - len(by_name)
    annotations = [str(each.annotation) for each in signature.parameters.values()]
    if num_by_place == 1 < len(args) and "Sequence" in annotations[0]:
        text += f" Pass a list: `{name}([...])`."
    elif by_name and (len(args) > num_by_place or not kwargs.keys() >= set(missing)):
        text += f" Pass arguments after `*` by name, as in `{[*missing, by_name[0].name][0]}=...`."
    return text
