"""The pages of the API reference, and the public names on each.

`PAGES` groups names by subject. A public name that is missing there is added to the end of its
module's page, and a public module without a page gets one, so the reference is complete.
"""

import dataclasses
import functools
import importlib
import inspect
import types
from collections.abc import Iterator

PACKAGE = "eqxlike"
REST = "More"


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the API.

    - `path`: the path of its file, without `api/` and `.md`.
    - `title`: its title, also in the menu.
    - `module`: the module of its names.
    - `sections`: maps the title of a section to its names, in order.
    - `takes_rest`: whether this page lists the names of the module that no page mentions.
    """

    path: str
    title: str
    module: str
    sections: dict[str, str]
    takes_rest: bool = False


PAGES = (
    Page(
        "module",
        "Modules",
        PACKAGE,
        {
            "A model": "Module field static_field Partial module_update_wrapper",
            "Abstract classes": "AbstractVar AbstractClassVar StrictConfig",
        },
    ),
    Page(
        "transformations",
        "Transformations",
        PACKAGE,
        {
            "Compiling": "filter_jit clear_caches filter_make_jaxpr filter_eval_shape "
            "filter_closure_convert filter_pure_callback",
            "Differentiating": "filter_grad filter_value_and_grad filter_jvp filter_vjp "
            "filter_jacfwd filter_jacrev filter_hessian filter_checkpoint filter_custom_jvp "
            "filter_custom_vjp",
            "Batches and devices": "filter_vmap if_array filter_shard filter_shard_map filter_pmap",
        },
    ),
    Page(
        "trees",
        "Trees and files",
        PACKAGE,
        {
            "Selecting leaves": "filter partition combine is_array is_array_like is_inexact_array "
            "is_inexact_array_like",
            "Changing and comparing": "tree_at apply_updates tree_inference tree_equal tree_check "
            "tree_flatten_one_level",
            "Printing": "tree_pformat tree_pprint",
            "Files": "tree_serialise_leaves tree_deserialise_leaves default_serialise_filter_spec "
            "default_deserialise_filter_spec",
        },
    ),
    Page(
        "tools",
        "Profiling and exporting",
        PACKAGE,
        {
            "Time and transfers": "profile transfers",
            "Exported programs": "export load_exported Exported",
        },
    ),
    Page(
        "checks",
        "Checks and other names",
        PACKAGE,
        {
            "Errors at run time": "error_if branched_error_if EqxlikeRuntimeError "
            "EqxlikeTracetimeError EquinoxRuntimeError EquinoxTracetimeError",
            "Checking caches": "checking_partitions PartitionError",
            "Enumerations": "Enumeration",
            "Libraries built on Equinox": "install_as_equinox",
        },
        takes_rest=True,
    ),
    Page(
        "nn/layers",
        "Layers",
        "eqxlike.nn",
        {
            "Linear": "Linear Identity MLP GatedMLP",
            "Convolution": "Conv1d Conv2d Conv3d Conv ConvTranspose1d ConvTranspose2d "
            "ConvTranspose3d ConvTranspose",
            "Pooling": "MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d Pool "
            "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AdaptiveAvgPool1d "
            "AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptivePool",
            "Normalisation": "LayerNorm RMSNorm GroupNorm BatchNorm SpectralNorm WeightNorm",
            "Sequences": "MultiheadAttention dot_product_attention Embedding "
            "RotaryPositionalEmbedding RNN GRUCell LSTMCell",
            "Text generation": "generate Sampler KVCache",
            "Activation and regularisation": "PReLU Dropout",
            "Loss": "cross_entropy",
        },
        takes_rest=True,
    ),
    Page(
        "nn/models",
        "Whole models",
        "eqxlike.nn",
        {
            "Composition": "Sequential Lambda Parallel ScanStack Shared",
            "State": "make_with_state State StateIndex StatefulLayer delete_init_state",
            "Looking at a model": "summary Summary LayerSummary",
            "Changing a model": "inference_mode tree_inference freeze unfreeze replace_layers "
            "reinitialise LoRALinear MergedLinear",
            "Precision": "MixedPrecision Policy",
            "Fusing": "fuse unfuse FusedLinear FusedAttention",
            "Random weights": "BayesianLinear BayesianConv BayesianMLP BayesianLayer to_bayesian "
            "kl_divergence posterior_mean sample_posterior with_perturbation",
        },
    ),
    Page(
        "train",
        "Training",
        "eqxlike.train",
        {
            "Steps and loops": "fit FitResult make_step TrainState make_evaluate EMA Run",
            "Batches": "minibatches batches_from prefetch Prefetch",
            "Looking on": "Callback Progress progress EarlyStopping Checkpoint JsonLines "
            "TensorBoard",
            "Files": "save restore Restored Saving CheckpointFolder CheckpointError "
            "export_safetensors import_safetensors Stored",
            "Devices": "shard data_parallel fsdp Sharding",
            "Numbers that are not finite": "keep_if_finite all_finite tree_where DynamicLossScale",
        },
        takes_rest=True,
    ),
    Page("train/metrics", "Metrics", "eqxlike.train.metrics", {}, takes_rest=True),
    Page(
        "bayes",
        "A model and its posterior",
        "eqxlike.bayes",
        {
            "The model": "Posterior Unknowns",
            "Priors": "normal horseshoe prior_by_path Prior",
            "Likelihoods": "Gaussian StudentT Bernoulli Categorical Poisson Likelihood",
            "Inference": "infer load FittedPosterior Method Problem",
            "Diagnostics": "convergence Convergence Diagnostics InferenceWarning PredictiveScores "
            "simulation_ranks",
            "Prediction": "predict predict_samples Mixture CategoricalMixture",
            "Calibration": "temperature_scaling TemperatureScaling conformal_intervals "
            "ConformalIntervals conformal_sets ConformalSets",
            "The evidence lower bound": "negative_elbo",
        },
        takes_rest=True,
    ),
    Page(
        "bayes/methods",
        "Methods",
        "eqxlike.bayes",
        {
            "Chains": "NUTS HMC MCLMC SGLD SGHMC",
            "Approximations": "Laplace MeanField Pathfinder SWAG MCDropout",
            "Points": "MAP DeepEnsemble EarlyStoppedEnsemble",
        },
    ),
    Page("bayes/metrics", "Metrics", "eqxlike.bayes.metrics", {}, takes_rest=True),
    Page("bayes/plot", "Pictures", "eqxlike.bayes.plot", {}, takes_rest=True),
    Page(
        "ad",
        "Differentiation",
        "eqxlike.ad",
        {
            "Modes": "Reverse Checkpointed Forward FiniteDifference Enzyme Auto Mode",
            "Choosing": "compare Comparison ComparisonRow differentiate_with Differentiated",
            "Derivatives": "jacobian hessian hvp jvp_and_vjp Pushforward taylor "
            "value_and_grad_into gradient_buffers",
        },
        takes_rest=True,
    ),
    Page(
        "loops",
        "Loops",
        "eqxlike.loops",
        {
            "Loops": "scan while_loop fori_loop",
            "Progress": "progress ProgressBar",
            "Buffers": "Buffer MaybeBuffer buffer_at_set",
            "One answer for a batch": "unvmap_any unvmap_all unvmap_max",
        },
        takes_rest=True,
    ),
    Page(
        "graph",
        "Compiled graphs",
        "eqxlike.graph",
        {"Reports": "report Report", "Stable maths": "stabilise unstable"},
        takes_rest=True,
    ),
    Page("graph/rules", "Rules for stable maths", "eqxlike.graph.rules", {}, takes_rest=True),
    Page(
        "debug",
        "Debugging",
        "eqxlike.debug",
        {
            "NaN and infinity": "find_nonfinite NonFinite Values backward_nan",
            "Traces": "explain_retraces Trace TraceDifference RetraceError RetraceWarning "
            "assert_max_traces get_num_traces announce_transform",
            "Inside a program": "breakpoint_if store_dce inspect_dce",
        },
        takes_rest=True,
    ),
    Page("extend", "For authors of libraries", "eqxlike.extend", {}, takes_rest=True),
    Page("internal", "For libraries built on Equinox", "eqxlike.internal", {}, takes_rest=True),
)

# The title in the menu of each part of the package.
PARTS = {
    PACKAGE: "eqxlike",
    "eqxlike.nn": "nn",
    "eqxlike.train": "train",
    "eqxlike.bayes": "bayes",
}


def public_modules(name: str = PACKAGE) -> Iterator[types.ModuleType]:
    """The public modules of the package. A module comes before its submodules."""
    module = importlib.import_module(name)
    yield module
    for each in sorted(_names(module)):
        value = getattr(module, each)
        if isinstance(value, types.ModuleType) and value.__name__ == f"{name}.{each}":
            yield from public_modules(value.__name__)


def public_names(module: types.ModuleType) -> list[str]:
    """The public names of a module that are not modules themselves."""
    return [each for each in _names(module) if not inspect.ismodule(getattr(module, each))]


def pages() -> list[Page]:
    """All pages. Every public name is on one of them."""
    mentioned: dict[str, set[str]] = {}
    for page in PAGES:
        named = mentioned.setdefault(page.module, set())
        named.update(name for names in page.sections.values() for name in names.split())
    known = [page.module for page in PAGES]
    found = list(PAGES)
    for module in public_modules():
        if module.__name__ not in known and public_names(module):
            path = module.__name__.removeprefix(f"{PACKAGE}.").replace(".", "/")
            title = path.rpartition("/")[2].capitalize()
            # A submodule comes after its module. A new module comes before `internal`.
            found.insert(-1, Page(path, title, module.__name__, {}, takes_rest=True))
    return [_completed(page, mentioned.get(page.module, set())) for page in found]


def summary(module: str, name: str) -> str:
    """The first sentence or line of a docstring."""
    value = getattr(importlib.import_module(module), name)
    if type(value).__doc__ == value.__doc__:
        return ""  # an instance has no docstring of its own
    first = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    if first.startswith(("**", ">>>")):
        return ""
    sentence, stop, _ = first.partition(". ")
    return sentence + stop.strip()


def shown(module: str, name: str) -> str:
    """A name as users write it: `nn.Linear`, `filter_jit`."""
    return f"{module}.{name}".removeprefix(f"{PACKAGE}.")


def home(module: str, name: str) -> tuple[str, str]:
    """The module and the name under which the reference documents an object with several names.

    This is the name that equals the object's `__name__`, or the first name if none is equal.
    """
    return _homes()[id(getattr(importlib.import_module(module), name))]


@functools.cache
def _homes() -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for page in pages():
        module = importlib.import_module(page.module)
        for names in page.sections.values():
            for name in names.split():
                value = getattr(module, name)
                own = getattr(value, "__name__", None)
                known = found.setdefault(id(value), (page.module, name))
                if known[1] != own and name == own:
                    found[id(value)] = (page.module, name)
    return found


def _completed(page: Page, mentioned: set[str]) -> Page:
    module = importlib.import_module(page.module)
    rest = [name for name in public_names(module) if name not in mentioned]
    if not (page.takes_rest and rest):
        return page
    last = {REST if page.sections else "": " ".join(sorted(rest, key=str.lower))}
    return dataclasses.replace(page, sections=page.sections | last)


def _names(module: types.ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or vars(module)
    return [name for name in names if not name.startswith("_")]
