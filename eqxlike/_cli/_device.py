"""The device that the demo runs on."""

import jax

from ._errors import CommandError

CHOICES = ("auto", "cpu", "gpu")


def choose_device(choice: str) -> str:
    """Holds JAX to a type of device; returns in words the one it uses.

    A choice of "cpu" must come before JAX starts a backend. "auto" is JAX's own choice: a GPU where
    it sees one.

    **Raises:** `CommandError` if JAX has no such device.
    """
    if choice == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise CommandError(f"JAX finds no device: {' '.join(str(error).split())}") from None
    if choice != "auto" and device.platform != choice:
        raise CommandError(
            f"argument --device: JAX runs on {device.platform} here, not on {choice}"
        )
    kind = device.device_kind
    return device.platform if kind == device.platform else f"{device.platform} ({kind})"
