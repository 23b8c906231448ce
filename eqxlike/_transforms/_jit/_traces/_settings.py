"""The settings of JAX on which a trace depends: where one differs, JAX traces again."""

from typing import Any

import jax

_NAMES = (
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_debug_key_reuse",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_check_tracer_leaks",
    "jax_check_static_indices",
    "jax_softmax_custom_jvp",
    "jax_high_dynamic_range_gumbel",
    "jax_accurate_erf_inv",
    "jax_allow_f16_reductions",
    "jax_use_shardy_partitioner",
    "jax_use_direct_linearize",
    "jax_use_simplified_jaxpr_constants",
    "jax_embedded_constants_max_bytes",
    "jax_remove_size_one_mesh_axis_from_type",
    "jax_mutable_array_checks",
    "jax_error_checking_behavior_nan",
    "jax_error_checking_behavior_divide",
    "jax_error_checking_behavior_oob",
    "jax_explicit_x64_dtypes",
    "jax_legacy_prng_key",
    "jax_auto_pcast",
    "jax_enable_pgle",
    "jax_pgle_profiling_runs",
    "jax_xla_profile_version",
    "jax_no_execution",
    "eager_constant_folding",
    "check_vma",
)
"""Found by changing each of `jax.config.values` between two calls. Not all are in all versions."""

Settings = tuple[tuple[str, str], ...]
"""Names and values, as text: a value may be a device."""


def read_settings() -> Settings:
    """The settings as they are in this thread, in the order of `_NAMES`; and the mesh, if any."""
    settings = [
        (name, str(getattr(jax.config, name))) for name in _NAMES if hasattr(jax.config, name)
    ]
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return (*settings, ("mesh", f"mesh({sizes})" if sizes else "None"))
