"""BlackJAX, which `bayes` takes its Markov chains from."""

import importlib
from typing import Any


def blackjax() -> Any:
    """The module `blackjax`.

    **Raises:** `ImportError` that says how to install it.
    """
    try:
        return importlib.import_module("blackjax")
    except ModuleNotFoundError as error:
        raise ImportError(
            "Markov chains come from BlackJAX: `pip install 'eqxlike[bayes]'`."
        ) from error
