"""Counts the files of the package that a call enters, and how often it passes from one file to
another. A reader who follows the call must open at least these files.

    python -m profiling.passages [--files]
"""

import argparse
import collections
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import eqxlike as eqx
from eqxlike import bayes, loops, nn, train

PACKAGE = str(pathlib.Path(eqx.__file__).parent) + "/"


class Passages(NamedTuple):
    """The number of function calls in each file, and the number of calls between files."""

    calls: collections.Counter[str]
    num_passages: int


def passages(call: Callable[[], Any]) -> Passages:
    """Counts the calls of the package's Python functions while `call` runs in this thread."""
    calls, num_passages = collections.Counter[str](), 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal num_passages
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        calls[file.removeprefix(PACKAGE)] += 1
        while (frame := frame.f_back) and not frame.f_code.co_filename.startswith(PACKAGE):
            pass
        num_passages += frame is not None and frame.f_code.co_filename != file

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Passages(calls, num_passages)


def cases(folder: pathlib.Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Named calls. Each call starts where the previous call ended."""
    model, x = nn.MLP(3, 2, 9, 2, key=jax.random.key(0)), jnp.ones(3)
    known = eqx.filter_jit(lambda model, x: model.layers[0].weight.sum() + x.sum())
    # The first call must not include work that is done once for a class.
    known(nn.MLP(4, 2, 8, 1, key=jax.random.key(1)), x)
    first = eqx.filter_jit(lambda model, x: model.layers[0].weight.sum() + x.sum())
    yield "filter_jit, first call with a new MLP", lambda: first(model, x)
    second = eqx.filter_jit(lambda model, x: model.layers[0].weight.sum() - x.sum())
    yield "filter_jit, first call with one whose partition is known", lambda: second(model, x)
    yield "filter_jit, every other call", lambda: second(model, x)

    optimiser = optax.adam(1e-3)
    state = train.TrainState.create(model, optimiser, key=jax.random.key(0))
    step = train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    batches = [jnp.ones((4, 3))] * 3
    yield "train.save", lambda: train.save(folder / "state", state)
    yield "train.fit, three steps", lambda: train.fit(state, step, batches, num_steps=3)
    yield "train.fit, three more", lambda: train.fit(state, step, batches, num_steps=3)
    yield (
        "loops.while_loop",
        lambda: loops.while_loop(lambda x: x < 3.0, lambda x: x + 1.0, jnp.zeros(()), max_steps=5),
    )
    target = bayes.Posterior(
        nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0)),
        prior=bayes.normal(0.0, 1.0),
        likelihood=bayes.Gaussian(scale=1.0),
        data=(jnp.ones((4, 3)), jnp.ones(4)),
    )
    yield (
        "bayes.infer, two steps to the mode",
        lambda: bayes.infer(target, bayes.MAP(steps=2), key=jax.random.key(0), progress=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", action="store_true", help="also print the calls in each file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, call in cases(pathlib.Path(folder)):
            found = passages(call)
            print(f"{name:60} {len(found.calls):3} files, {found.num_passages:5} passages")
            for file, count in found.calls.most_common() if arguments.files else ():
                print(f"{count:8} {file}")


if __name__ == "__main__":
    main()
