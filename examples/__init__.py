"""Scripts, run as `python examples/NAME.py`, and the demo, run as `python -m examples.demo`."""
