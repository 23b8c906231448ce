"""The rules of the house: which file may import what, read off the source with `ast`.

A file imports only from layers below its own. `LAYERS` is the map; a file or folder that it does
not know is an error, so that a new one is placed on purpose.
"""

import ast
import dataclasses
import functools
import importlib
import pathlib
import sys
from collections.abc import Iterator

from eqxlike import Module

PACKAGE = pathlib.Path(__file__).parent.parent / "eqxlike"

LAYERS = {
    "_traceback": 1,
    "_compat": 0,
    "_dtypes": 0,
    "_first_use": 1,
    "_moved": 0,
    "_check_numbers": 0,
    "_standing_in": 3,
    "_interrupt": 0,
    "_programs": 2,
    "_progress": 0,
    "_tables": 0,
    "_version": 0,
    "_pytree": 1,
    "_timing": 1,
    "_transfers": 3,
    "_module": 2,
    "_partition": 3,
    "_transforms": 4,
    "_export": 5,
    "_profile": 5,
    "ad": 5,
    "debug": 5,
    "graph": 5,
    "loops": 5,
    "nn": 5,
    "bayes": 6,
    "internal": 6,
    "train": 7,
    "_cli": 8,
    "__main__": 9,
    "__init__": 9,
}

# Receives models and losses, and so has no need to know any.
FORBIDDEN = {"train": {"nn", "bayes"}}

# The rooms of a part, lowest first. A file imports from its own room and from those below.
LAYERS_OF_NN = "a layer"
ROOMS = {
    "_transforms": (
        {"_signatures"},
        {"_flat_call"},
        {"_callback"},
        {"_checks", "_derivatives", "_sharding"},
        {"_enumeration", "_jit", "_named_arrays"},
        {"_mapping"},
    ),
    "ad": (
        {"_modes"},
        {"_differentiate_with", "_jacobian", "_products", "_sparse"},
        {"_measuring"},
        {"_compare"},
        {"_choose"},
    ),
    "_export": ({"_form"}, {"_file"}, {"_run"}, {"_exported"}, {"_export"}),
    "bayes": (
        {"_libraries"},
        {"_likelihoods", "_mixtures", "_priors"},
        {"metrics"},
        {"_calibration", "plot"},
        {"_posterior"},
        {"_inference"},
        {"_methods", "_predict"},
    ),
    "graph": (
        {"_flops", "_hlo"},
        {"_operations"},
        {"_rows", "_stable"},
        {"_text", "template.html"},
        {"_report"},
    ),
    "loops": (
        {"_flat"},
        {"_buffers"},
        {"_body"},
        {"_loops", "_progress"},
    ),
    "nn": (
        {"_inputs", "_threefry"},
        {"_attend_blocks", "_conv_cpu", "_parameters", "_windows"},
        {"_attend_fused", "_stateful"},
        {"_dot_product_attention"},
        {"_kv_cache"},
        {LAYERS_OF_NN, "_generate", "_parallel"},
        {"_bayesian"},
        {"_surgery"},
    ),
    "train": (
        {"_as_arrays", "_checks"},
        {"_loss_scale", "_metrics"},
        {"_checkpoints", "_state", "metrics"},
        {"_ema", "_guards", "_safetensors", "_sharding"},
        {"_run"},
        {"_batches", "_batches_from", "_callbacks", "_step"},
        {"_loop", "_make_evaluate"},
    ),
}
# A family of layers imports none of its siblings, but for those that networks and attention are
# made of.
SHARED_LAYERS = {"_dropout", "_embedding", "_linear", "_norm"}

CORE = {"jax", "jaxlib", "jaxtyping", "numpy", "optax", "wadler_lindig"}
# Imported inside the function that needs them: without them the rest of the package works.
EXTRAS = {
    "arviz_stats",
    "etils",
    "matplotlib",
    "orbax",
    "pyinstrument",
    "rich",
    "safetensors",
    "sklearn",
    "tensorboardX",
    "threadpoolctl",
    "tqdm",
}

MAX_LINES = 700


@dataclasses.dataclass(frozen=True)
class Import:
    module: tuple[str, ...]  # ("eqxlike", "nn", "_linear"), relative imports resolved
    names: tuple[str, ...]  # what `from module import names` takes; () for `import module`
    line: int
    is_nested: bool  # inside a function or class
    is_late: bool  # at the top level, below the first function or class


parsed = functools.cache(ast.parse)


@functools.cache
def imports_of(path: str, source: str) -> list[Import]:
    """The imports in the file at `path`, which is relative to the package."""
    return list(_imports_in(path, parsed(source)))


def _imports_in(path: str, tree: ast.Module) -> Iterator[Import]:
    package = ("eqxlike", *pathlib.PurePosixPath(path).parts[:-1])
    definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    first = min((node.lineno for node in tree.body if isinstance(node, definition)), default=1e9)
    # Imports are statements: no expression has to be looked into.
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, is_nested = stack.pop()
        is_nested |= isinstance(node, definition)
        stack += [
            (each, is_nested)
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case)
        ]
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        where = node.lineno, is_nested, node.lineno > first
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(tuple(alias.name.split(".")), (), *where)
        else:
            named = tuple(node.module.split(".")) if node.module else ()
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield Import(base + named, tuple(alias.name for alias in node.names), *where)


def violations(path: str, source: str) -> list[str]:
    """Says which rules the file at `path`, relative to the package, breaks; empty if none."""
    own = path.split("/")[0].removesuffix(".py")
    if own not in LAYERS:
        return [f"{path}: `{own}` has no layer: add it to LAYERS in {pathlib.Path(__file__).name}"]
    tree = parsed(source)
    found = []
    if (lines := source.count("\n")) > MAX_LINES:
        found.append(f"{path}: {lines} lines, at most {MAX_LINES}: look for the second idea in it")
    if path.endswith("__init__.py"):
        found += _beside_reexports(path, tree)
    if path != "_compat.py":
        found += _private_jax(path, source, tree)
    for imported in imports_of(path, source):
        if imported.module[0] == "eqxlike":
            problems = _inner_problems(path, own, imported)
        else:
            problems = _outer_problems(path, imported)
        found += [f"{path}:{imported.line}: {problem}" for problem in problems]
    return found


def _inner_problems(path: str, own: str, imported: Import) -> Iterator[str]:
    """What is wrong with an import of a part of eqxlike."""
    if imported.is_nested or imported.is_late:
        yield "an import of eqxlike's own stands at the top of the file"
    # `from .. import nn` names the part in its names, `from ..nn import Linear` in its module.
    parts = [imported.module[1]] if len(imported.module) > 1 else imported.names or ("__init__",)
    for part in parts:
        if part not in LAYERS:
            yield f"imports `{part}` from the root of the package, which lies above all layers"
        elif part == own:
            yield from _room_problems(path, own, imported)
        elif LAYERS[part] >= LAYERS[own]:
            yield (
                f"`{own}` (layer {LAYERS[own]}) imports `{part}` (layer {LAYERS[part]}), "
                "which is not below it"
            )
        elif part in FORBIDDEN.get(own, ()):
            yield f"`{own}` imports neither of {sorted(FORBIDDEN[own])}"


def _room_problems(path: str, own: str, imported: Import) -> Iterator[str]:
    """What is wrong with an import from another room of the same part, or from a sibling."""
    if own not in ROOMS or path == f"{own}/__init__.py":
        return
    _, *parts = path.split("/")
    here = parts[0].removesuffix(".py")
    for there in imported.module[2:3] or imported.names:
        if there == here:
            continue
        own_rank, rank = _rank_of_room(own, here, len(parts) > 1), _rank_of_room(own, there)
        if rank is None or own_rank is None:
            unplaced = there if rank is None else here
            yield f"`{own}/{unplaced}` has no room: add it to ROOMS"
        elif own == "nn" and own_rank == rank:
            if there not in SHARED_LAYERS:
                yield f"a family of layers imports none of its siblings, and this is `{there}`"
        elif rank >= own_rank:
            yield f"`{here}` imports `{there}`, which is not below it"


def _rank_of_room(own: str, name: str, is_folder: bool = False) -> int | None:
    """How high the file or folder `name` of the part `own` stands in it; `None` if nobody said."""
    ranks = {each: rank for rank, names in enumerate(ROOMS[own]) for each in names}
    is_folder = is_folder or (PACKAGE / own / name).is_dir()
    is_layer = own == "nn" and not is_folder
    return ranks.get(name, ranks[LAYERS_OF_NN] if is_layer else None)


def _outer_problems(path: str, imported: Import) -> Iterator[str]:
    """What is wrong with an import of something that is not eqxlike."""
    root = imported.module[0]
    if root == "jaxlib" and path != "_compat.py":
        yield "jaxlib is for _compat.py alone"
    if root in EXTRAS:
        if not imported.is_nested:
            yield f"`{root}` is an extra: import it in the function that needs it"
    elif root not in CORE | set(sys.stdlib_module_names):
        yield f"`{root}` is neither a core dependency nor an extra that the package may import"
    elif imported.is_nested or imported.is_late:
        yield f"the import of `{root}` stands at the top of the file"


def _private_jax(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    """Mentions of names that are private to JAX: renames of such broke many a library."""
    for number, line in enumerate(source.splitlines(), start=1):
        if "jax._src" in line:
            yield f"{path}:{number}: jax._src is for _compat.py alone"
    for imported in imports_of(path, source):
        names = [*imported.module, *imported.names]
        if names[0] == "jax" and (private := [name for name in names if _is_private(name)]):
            yield f"{path}:{imported.line}: `{private[0]}` is private to JAX: use _compat.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            inner = node.value
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "jax":
                yield f"{path}:{node.lineno}: `{node.attr}` is private to JAX: use _compat.py"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _beside_reexports(path: str, tree: ast.Module) -> Iterator[str]:
    """What an `__init__.py` holds beside its docstring and `from ._x import y as y`, and beside the
    names that wait for their first use.
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


HOW_NAMES_WAIT = (
    "import typing as _typing",
    "from ._first_use import on_first_use as _on_first_use",
    "from .._moved import former_names as _former_names",
    "from ..._moved import former_names as _former_names",
    # A type checker that sees the function accepts any name.
    "if not _typing.TYPE_CHECKING:\n    __getattr__ = _former_names(__name__)",
)


def _is_reexport(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.ImportFrom)
        and node.level > 0
        and all(alias.name == alias.asname for alias in node.names)
    )


def _waiting_problems(path: str, branches: ast.If) -> Iterator[str]:
    """What is wrong with names that a type checker finds imported, and Python on first use."""
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


def test_map_holds_what_the_package_holds():
    names = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert names - {"__pycache__", "py.typed"} == set(LAYERS)


def test_map_of_rooms_holds_what_each_part_holds():
    for part, ranks in ROOMS.items():
        names = {path.name.removesuffix(".py") for path in (PACKAGE / part).iterdir()}
        mapped = {name for rank in ranks for name in rank} - {LAYERS_OF_NN}
        assert mapped <= names
        if part != "nn":
            assert names - mapped <= {"__pycache__", "__init__"}


def test_helpers_of_nn_define_no_layer():
    for name in ("_inputs", "_threefry", "_parameters", "_windows"):
        helper = importlib.import_module(f"eqxlike.nn.{name}")
        own = [
            each
            for each in vars(helper).values()
            if getattr(each, "__module__", "") == helper.__name__
        ]
        assert not [each for each in own if isinstance(each, type) and issubclass(each, Module)]


def test_extras_are_those_that_the_package_uses():
    imported = {
        found.module[0]
        for path, file in FILES.items()
        for found in imports_of(path, file.read_text())
    }
    assert imported - CORE - set(sys.stdlib_module_names) - {"eqxlike"} == EXTRAS


WAITING = """
import typing as _typing
from ._first_use import on_first_use as _on_first_use
if _typing.TYPE_CHECKING:
    from . import nn as nn, train as train
    from .nn import tree_inference as tree_inference
else:
    __getattr__, __dir__, __all__ = _on_first_use(
        __name__, "nn", "train", tree_inference="nn"
    )
"""

BROKEN = [
    ("new.py", "", "`new` has no layer"),
    ("_module/_field.py", "from .._transforms import filter_jit", "not below it"),
    ("_module/_field.py", "import eqxlike._transforms", "not below it"),
    ("_module/_field.py", "from .. import nn", "not below it"),
    ("_module/_field.py", "from .. import Module", "above all layers"),
    ("_module/a/_field.py", "from ..._partition import partition_of", "not below it"),
    ("train/_step.py", "from ..nn import MLP", "imports neither of"),
    ("nn/_mlp.py", "from ._sequential import Lambda", "none of its siblings"),
    ("nn/_mlp.py", "from eqxlike.nn import Dropout", "none of its siblings"),
    ("nn/_mlp.py", "from ._surgery import freeze", "`_mlp` imports `_surgery`, which is not below"),
    ("nn/_other/_state.py", "from .._inputs import describe", "`nn/_other` has no room"),
    ("_transforms/_jit/_dispatch.py", "from .._mapping import filter_vmap", "not below it"),
    ("_transforms/_flat_call.py", "from ._new import x", "`_transforms/_new` has no room"),
    ("_module/_field.py", "def f():\n    from .._pytree import tree_at", "top of the file"),
    ("_module/_field.py", "def f(): pass\nfrom .._pytree import tree_at", "top of the file"),
    ("_module/_field.py", "import functools\ndef f(): pass\nimport os", "top of the file"),
    ("_module/_field.py", "import jax._src.core", "jax._src is for _compat.py alone"),
    ("_module/_field.py", "from jax import _src", "private to JAX"),
    ("_module/_field.py", "import jax\njax.tree_util._registry", "private to JAX"),
    ("_module/_field.py", "import jaxlib.xla_client", "jaxlib is for _compat.py alone"),
    ("_cli/_demo.py", "import sklearn.datasets", "is an extra"),
    ("_cli/_demo.py", "def f():\n    import equinox", "neither a core dependency nor an extra"),
    ("nn/__init__.py", "from ._linear import Linear", "re-exports alone"),
    ("__init__.py", "from jax import jit as jit", "re-exports alone"),
    ("__init__.py", WAITING.replace('"nn", ', ""), "sees other names than Python"),
    ("__init__.py", WAITING + "    x = 1", "sees other names than Python"),
    ("nn/_choose.py", "x = 1\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines"),
]


def test_breaches_are_found():
    for path, source, message in BROKEN:
        assert any(message in violation for violation in violations(path, source)), source
