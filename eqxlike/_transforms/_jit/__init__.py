"""`filter_jit`: for each call, finds or compiles a function that takes a flat list of arrays.

The modules in reading order (docs/design.md gives an overview of the fast and the slow path of a
call):

- `_filter_jit`: the public function, the callable that it returns, its errors and its dispatcher.
- `_dispatch`: the slow path of a call, from its arguments to `jax.jit` and back.
- `_fast_path`: the generated function that later calls try first. It also has two parts of a
  compiled function: the arrays in static arguments, and JAX's warnings about donation.
- `_arguments`: a callable as a function and its bound arguments; the order of arguments.
- `_traces`, `_differences`: records of traces, and explanations of retraces.
- `_measured`: traces and times for reports.
"""
