"""Loops of lists of arrays, and their derivatives.

`_scan` has what a scan is (`Scan`, `Operands`) and into which segments it falls; `_step` runs it,
and differentiates one step; `_tangents` finds which arrays have tangents. `_counted_scan` and
`_counted_while` are the differentiable loops, `_revolve` their reverse mode with few saved carries,
and `_batched` keeps them one loop under `jax.vmap`.
"""
