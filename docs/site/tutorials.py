"""The pages of the tutorials, generated from the scripts in examples/ and their output.

`python -m docs.site.tutorials [NAME ...]` runs the named scripts, or all. It keeps their output in
docs/site/outputs/ and their pictures in docs/images/tutorials/.
"""

import ast
import os
import pathlib
import subprocess
import sys
from typing import Any

from docs.site.links import HOME, ROOT

EXAMPLES = ROOT / "examples"
OUTPUTS = pathlib.Path(__file__).parent / "outputs"
PICTURES = ROOT / "docs" / "images" / "tutorials"

TITLES = {
    "classifier": "Train, stop early, resume",
    "mlp_classifier": "A classifier in eqxlike and raw JAX",
    "language_model": "A small language model",
    "vae": "A variational autoencoder",
    "lora": "Low-rank adaptation",
    "neural_ode": "A neural ODE",
    "physics_informed": "A physics-informed network",
    "reinforcement_learning": "Reinforcement learning",
    "flow": "A normalising flow",
    "ensemble": "An ensemble",
    "bayesian": "A Bayesian network",
    "bnn_coverage": "Coverage of Bayesian networks",
    "simulation_based_calibration": "Simulation-based calibration",
    "differentiation_modes": "Which mode of differentiation",
    "profile_step": "Profiling your own step",
    "devices": "Data-parallel and FSDP",
    "multi_host": "Many devices and hosts",
    "export_model": "Exporting a model",
    "loops": "Graphs and costs of loops",
    "foreign_function": "Functions in C++ and Numba",
}

# Options that shorten a script.
OPTIONS = {
    "bnn_coverage": ["--seeds", "2"],
    "foreign_function": ["--quick"],
    "loops": ["--quick"],
    "mlp_classifier": ["--epochs", "20"],
    "simulation_based_calibration": ["--simulations", "50"],
}
# The captions of the pictures that scripts draw with `--out`.
PICTURED = {
    "bayesian": "Intervals of each method, within and beyond the range of the training data",
    "neural_ode": "Trajectories from new initial states: the truth, the network, the linear law",
    "simulation_based_calibration": "Ranks of the true values among the draws, by method",
    "vae": "Above: held-out digits. Below: digits from the decoder",
}
# Makes JAX use the CPU as four devices.
FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
ENVIRONMENT = {"devices": FOUR_DEVICES, "multi_host": FOUR_DEVICES}


def menu() -> list[Any]:
    return ["tutorials/index.md", *({_title(name): _path(name)} for name in _names())]


def files() -> dict[str, str]:
    """The Markdown of each page, by path."""
    return {"tutorials/index.md": _index()} | {_path(name): _page(name) for name in _names()}


def paths() -> dict[str, str]:
    """The path of each tutorial, by the target of a link from a page in `docs/` to its script."""
    return {f"../examples/{name}.py": _path(name) for name in _names()}


def record(name: str) -> None:
    """Runs a script and keeps its output, with the command above it."""
    variables = ENVIRONMENT.get(name, {})
    command = ["python", f"examples/{name}.py", *OPTIONS.get(name, [])]
    picture: list[str] = []
    if name in PICTURED:
        PICTURES.mkdir(exist_ok=True)
        picture = ["--out", str(PICTURES / f"{name}.png")]
    process = subprocess.run(
        [sys.executable, *command[1:], *picture],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if picture:
        command += ["--out", f"{name}.png"]
    shown = " ".join([*(f"{key}={value}" for key, value in variables.items()), *command])
    OUTPUTS.mkdir(exist_ok=True)
    lines = [f"$ {shown}", *(line.rstrip() for line in process.stdout.splitlines())]
    (OUTPUTS / f"{name}.txt").write_text("\n".join(lines) + "\n")


def _names() -> list[str]:
    found = {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_")}
    return [name for name in TITLES if name in found] + sorted(found - set(TITLES))


def _title(name: str) -> str:
    return TITLES.get(name) or name.replace("_", " ").capitalize()


def _path(name: str) -> str:
    return f"tutorials/{name.replace('_', '-')}.md"


def _docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""


def _page(name: str) -> str:
    source = (EXAMPLES / f"{name}.py").read_text()
    parts = [f"# {_title(name)}", _docstring(name)]
    output = OUTPUTS / f"{name}.txt"
    if output.exists():
        parts += ["## Output", f"```console\n{output.read_text()}```"]
    if name in PICTURED:
        parts += ["## Picture", f"![{PICTURED[name]}](../images/tutorials/{name}.png)"]
    code = source.split('"""', 2)[2].strip() if source.startswith('"""') else source
    parts += [
        "## The script",
        f"[examples/{name}.py]({HOME}/examples/{name}.py)",
        f"```python\n{code}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _index() -> str:
    lines = [
        "# Tutorials",
        "",
        "Each tutorial is a script in `examples/`, with its output. Tests run it in a short form.",
        "",
    ]
    for name in _names():
        first = _docstring(name).partition("\n\n")[0].replace("\n", " ")
        lines += [f"- **[{_title(name)}]({_path(name).removeprefix('tutorials/')})**: {first}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for each in sys.argv[1:] or _names():
        record(each)
