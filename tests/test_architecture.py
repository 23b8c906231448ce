"""Rules of the source that ruff and import-linter do not check."""

import ast
import functools
import pathlib
import sys
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parent.parent / "eqxlike"
MAX_LINES = 700

# The packages of `dependencies`, and the packages of the extras.
CORE = {"jax", "jaxlib", "jaxtyping", "numpy", "optax", "wadler_lindig"}
EXTRAS = {
    "etils",
    "matplotlib",
    "orbax",
    "pyinstrument",
    "rich",
    "safetensors",
    "tensorboardX",
    "tqdm",
}

HOW_NAMES_WAIT = (
    "import typing as _typing",
    "from ._names import on_first_use as _on_first_use",
    "from .._names import former_names as _former_names",
    "from ..._names import former_names as _former_names",
    # A type checker that sees a module's `__getattr__` accepts any name.
    "if not _typing.TYPE_CHECKING:\n    __getattr__ = _former_names(__name__)",
)

parsed = functools.cache(ast.parse)


def violations(path: str, source: str) -> Iterator[str]:
    """The rules that the file at `path` breaks. `path` is relative to the package."""
    tree = parsed(source)
    if (lines := source.count("\n")) > MAX_LINES:
        yield f"{path}: {lines} lines, at most {MAX_LINES}: look for the second idea in it"
    if path.endswith("__init__.py"):
        yield from _beside_reexports(path, tree)
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if path != "_compat.py" and (name := _private_of_jax(node)):
            yield f"{where}: `{name}` is private to JAX: use _compat.py"
        for root in _imported(node) - CORE - EXTRAS - {"eqxlike", *sys.stdlib_module_names}:
            yield f"{where}: `{root}` is neither a core dependency nor an extra"


def _private_of_jax(node: ast.AST) -> str | None:
    names = []
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jax":
        names = [*node.module.split("."), *(each.name for each in node.names)]
    elif isinstance(node, ast.Attribute):
        inner = node.value
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        names = [node.attr] if isinstance(inner, ast.Name) and inner.id == "jax" else []
    private = (name for name in names if name.startswith("_") and not name.startswith("__"))
    return next(private, None)


def _imported(node: ast.AST) -> set[str]:
    """The packages that a statement imports, except in relative imports."""
    if isinstance(node, ast.Import):
        return {each.name.split(".")[0] for each in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.split(".")[0]}
    return set()


def _beside_reexports(path: str, tree: ast.Module) -> Iterator[str]:
    """Statements of an `__init__.py` other than its docstring, `from ._x import y as y`, and lazy
    names.
    """
    for number, node in enumerate(tree.body):
        is_docstring = (
            number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )
        if is_docstring or _is_reexport(node) or ast.unparse(node) in HOW_NAMES_WAIT:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "_typing.TYPE_CHECKING":
            yield from _waiting_problems(path, node)
        else:
            yield (
                f"{path}:{node.lineno}: an __init__.py holds re-exports alone, "
                "written `from ._x import y as y`"
            )


def _is_reexport(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.ImportFrom)
        and node.level > 0
        and all(alias.name == alias.asname for alias in node.names)
    )


def _waiting_problems(path: str, branches: ast.If) -> Iterator[str]:
    """Lazy names that differ between the branch for type checkers and the branch for Python."""
    imported = [node for node in branches.body if isinstance(node, ast.ImportFrom)]
    modules = [each.name for node in imported if not node.module for each in node.names]
    homes = {each.name: node.module for node in imported if node.module for each in node.names}
    call = ast.Call(
        ast.Name("_on_first_use"),
        [ast.Name("__name__"), *map(ast.Constant, modules)],
        [ast.keyword(name, ast.Constant(home)) for name, home in homes.items()],
    )
    expected = f"__getattr__, __dir__, __all__ = {ast.unparse(call)}"
    found = "\n".join(map(ast.unparse, branches.orelse))
    if not all(map(_is_reexport, branches.body)) or found != expected:
        yield f"{path}:{branches.lineno}: a type checker sees other names than Python: {expected}"


FILES = {
    str(path.relative_to(PACKAGE).as_posix()): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "__pycache__" not in path.parts
}


def test_files_keep_the_rules():
    found = [violations(path, file.read_text()) for path, file in FILES.items()]
    assert [each for violations in found for each in violations] == []


def test_extras_are_exactly_the_imported_packages():
    nodes = (node for file in FILES.values() for node in ast.walk(parsed(file.read_text())))
    imported = {root for node in nodes for root in _imported(node)}
    assert imported - CORE - set(sys.stdlib_module_names) - {"eqxlike"} == EXTRAS


WAITING = """
import typing as _typing
from ._names import on_first_use as _on_first_use
if _typing.TYPE_CHECKING:
    from . import nn as nn, train as train
    from .nn import tree_inference as tree_inference
else:
    __getattr__, __dir__, __all__ = _on_first_use(
        __name__, "nn", "train", tree_inference="nn"
    )
"""

BROKEN = [
    ("_module/_fields.py", "from jax import _src", "private to JAX"),
    ("_module/_fields.py", "import jax\njax.tree_util._registry", "private to JAX"),
    ("nn/_mlp.py", "def f():\n    import equinox", "neither a core dependency nor an extra"),
    ("nn/__init__.py", "from ._linear import Linear", "re-exports alone"),
    ("__init__.py", "from jax import jit as jit", "re-exports alone"),
    ("__init__.py", WAITING.replace('"nn", ', ""), "sees other names than Python"),
    ("__init__.py", WAITING + "    x = 1", "sees other names than Python"),
    ("nn/_choose.py", "x = 1\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines"),
]


def test_violations_are_found():
    for path, source, message in BROKEN:
        assert any(message in violation for violation in violations(path, source)), source
