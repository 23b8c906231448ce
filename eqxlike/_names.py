"""Names of a package: imported on first use, renamed and removed ones, and names of PyTorch."""

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any


def on_first_use(
    package: str, *modules: str, **homes: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes the `__getattr__`, `__dir__` and `__all__` of a package with lazy imports (PEP 562).

    A type checker does not understand lazy imports, so the package must also import the names under
    `TYPE_CHECKING`.

    **Arguments:**

    - `package`: the `__name__` of the package. The package must already have imported its other
      names.
    - `modules`: names of submodules.
    - `homes`: maps further names to the submodules that define them.
    """
    homes |= {name: name for name in modules}
    namespace = vars(sys.modules[package])
    former_name = former_names(package)

    def get(name: str) -> Any:
        if name not in homes:
            return former_name(name)
        module = importlib.import_module(f"{package}.{homes[name]}")
        # From now on, Python finds the name in the namespace of the package, and does not call
        # `get`.
        namespace[name] = module if name in modules else getattr(module, name)
        return namespace[name]

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    return get, names, [name for name in names() if not name.startswith("_")]


def import_extra(module: str, message: str) -> Any:
    """Imports a module that an extra installs.

    **Raises:** `ImportError(message)` if the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(message) from error


# --- Names of earlier versions, and names of PyTorch ---


_RULES = """RULES Part Parts Rewrite Rule Step Value argument_of constant_of factors_of is_same
    terms_of"""

RENAMED: dict[str, str] = {
    f"eqxlike.graph.{name}": f"eqxlike.graph.rules.{name}" for name in _RULES.split()
}
"""Maps old full names to new ones. Access to an old name warns and returns the new object."""

_PLAN = "`sharding.of_state` splits shapes on any mesh: see examples/plan_training.py."
_COLLECTIVES = "`graph.report(step, state, batch).collectives` lists them."

_RECORDS = "`graph.report` and `graph.unstable` return objects that hold these records."
_GRAPH_RECORDS = "Compiled Constant Effect Memory Row Side Stored Unstable"
_CACHE = 'Call `jax.config.update("jax_compilation_cache_dir", folder)`: see docs/shipping.md.'

_LEAVE_ONE_OUT = "Call `arviz_stats.loo(posterior.to_arviz())`."

REMOVED: dict[str, str] = {
    **{f"eqxlike.graph.{name}": _RECORDS for name in _GRAPH_RECORDS.split()},
    **{f"eqxlike.train.{name}": _COLLECTIVES for name in ("Collective", "collectives")},
    **{f"eqxlike.train.{name}": _PLAN for name in ("Exchange", "Memory", "Plan", "plan")},
    "eqxlike.ad.choose": "Compare modes by `ad.compare`, and pass the fastest correct one.",
    "eqxlike.ad.sparse_hessian": "Use asdex: `asdex.hessian(function)`.",
    "eqxlike.ad.sparse_jacobian": "Use asdex: `asdex.jacobian(function)`.",
    "eqxlike.CompilationCache": _CACHE,
    "eqxlike.TransferError": "`graph.report(function, *args).effects` lists a program's callbacks.",
    "eqxlike.bayes.metrics.LeaveOneOut": _LEAVE_ONE_OUT,
    "eqxlike.bayes.metrics.psis_loo": _LEAVE_ONE_OUT,
    "eqxlike.bayes.plot.ranks": (
        "`arviz_plots.plot_rank_dist(posterior.to_arviz())` draws them: pip install arviz-plots."
    ),
    "eqxlike.bayes.plot.traces": (
        '`posterior.to_arviz().posterior[name].plot.line(x="draw")` draws them with xarray.'
    ),
    "eqxlike.cache_compilations": _CACHE,
}
"""Maps the full name of each removed object to a sentence that says what to use instead."""


_ACTIVATIONS = (
    "CELU ELU GELU GLU LeakyReLU LogSoftmax Mish ReLU ReLU6 SELU SiLU Sigmoid Softmax Tanh"
)

OF_PYTORCH: dict[str, str] = {
    **dict.fromkeys(_ACTIVATIONS.split(), "Use a function, such as `jax.nn.relu`."),
    "CrossEntropyLoss": "Use `nn.cross_entropy`, or a loss of Optax.",
    "Flatten": "Use `nn.Lambda(jnp.ravel)`: a layer takes one example.",
    "GRU": "Use `nn.RNN` with an `nn.GRUCell`.",
    "LSTM": "Use `nn.RNN` with an `nn.LSTMCell`.",
    "MSELoss": "Use `optax.l2_loss`, or write the formula.",
    "Module": "Use `eqxlike.Module`.",
    "ModuleDict": "Use a dict.",
    "ModuleList": "Use a list.",
    "Parameter": "Assign an array to a field. `nn.freeze` makes an array constant.",
}
"""Maps names of `torch.nn` that `eqxlike.nn` does not have to what to use instead."""


def former_names(package: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` (PEP 562) of a package for its renamed and removed names."""

    def get(name: str) -> Any:
        old = f"{package}.{name}"
        if old in RENAMED:
            new = RENAMED[old]
            message = f"{old} is deprecated and will be removed. Use {new}."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            module, _, attribute = new.rpartition(".")
            return getattr(importlib.import_module(module), attribute)
        message = f"module {package!r} has no attribute {name!r}"
        if old in REMOVED:
            message = f"{old} was removed. {REMOVED[old]}"
        elif package == "eqxlike.nn" and name in OF_PYTORCH:
            message += f". {OF_PYTORCH[name]} See docs/from-pytorch.md."
        raise AttributeError(message, name=name, obj=importlib.import_module(package))

    return get
