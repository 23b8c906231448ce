"""The measured tables, generated from the reports in benchmarks/results/.

The site has a page for each benchmark. The repository has `docs/measured.md`, with the tables that
the guides quote. `python -m docs.site.measured` updates it.
"""

import ast
import dataclasses
import json
import pathlib
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import ad_tables, ages, bayes_cost, exactness, table
from benchmarks import all as everything
from benchmarks.quality import tables as quality
from docs.site import trend
from docs.site.links import HOME, ROOT

RESULTS = ROOT / "benchmarks" / "results"
NAME = re.compile(r"(?P<benchmark>.+?)-(?P<device>\w+)-jax-(?P<jax>[\d.]+)")
TITLED = re.compile(r"^(?!\||- |#)(?P<title>\S.*)\n\n(?=\|)", re.MULTILINE)
# The entries of `machine` that are not versions of packages.
NO_VERSION = {"date", "platform", "cpu", "cores", "backend", "device", "devices"}

Report = Mapping[str, Any]


def _plain(report: Report) -> str:
    return table.render(report, markdown=True)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """The title and the question of a benchmark, and the function that draws its tables."""

    title: str
    question: str
    render: Callable[[Report], str] = _plain


BENCHMARKS = {
    "jit_overhead": Benchmark(
        "Calls of filter_jit",
        "The cost of a call, compared with `jax.jit`, Equinox and NNX. The baseline is `jax.jit` "
        "on the same Module, its arrays split off outside; the floor is `jax.jit` on a flat list "
        "of the arrays.",
    ),
    "jit_edges": Benchmark(
        "Calls at the edges",
        "First calls, models of a thousand arrays, lists and dicts in a model, arguments of other "
        "libraries, memory.",
    ),
    "layers": Benchmark(
        "Layers",
        "Building, compiling, running and differentiating networks, compared with Equinox and NNX, "
        "with the same weights and outputs.",
    ),
    "models": Benchmark(
        "Whole models",
        "Training steps of language models, a CNN, an MLP and an LSTM, in time and memory, "
        "compared with JAX by hand, Equinox and NNX; and the first step of a process.",
    ),
    "loops": Benchmark("Loops", "The kinds of loops and their gradients, in time and memory."),
    "downstream": Benchmark(
        "Libraries built on Equinox",
        "Lineax, Optimistix and Diffrax, on eqxlike and on Equinox, in fresh processes.",
    ),
    "export": Benchmark(
        "Exported programs",
        "The first call of an exported network in a fresh process, compared with tracing it again.",
    ),
    "ad-modes": Benchmark(
        "Modes of differentiation",
        "Which mode is correct for which model, and what value and gradient cost.",
        lambda report: ad_tables.render(report, markdown=True),
    ),
    "bayes-cost": Benchmark(
        "Bayesian methods: cost",
        "The cost of each method, compared with its limit.",
        lambda report: bayes_cost.render(report, markdown=True),
    ),
    "bayes-quality": Benchmark(
        "Bayesian methods: quality",
        "Every method on real data, compared with plain networks and classical models.",
        lambda report: quality.render(report, markdown=True),
    ),
    "exactness": Benchmark(
        "Bayesian methods: exactness",
        "The uncertainty of each method, compared with exact answers.",
        lambda report: exactness.render(report, markdown=True),
    ),
    "all": Benchmark(
        "Whole runs",
        "The benchmarks and tests that ran on a device within a given time.",
        lambda report: everything.render(report, markdown=True),
    ),
}


SUMMARY = ROOT / "docs" / "measured.md"
QUOTED = {
    "jit_overhead": (
        "Calls",
        "`python -m benchmarks.jit_overhead` (`make bench`) first checks that all columns compute "
        "the same numbers. The columns:",
        "- `jax.jit, flat list`: `jax.jit` on a flat list of the model's arrays, the least that a "
        "call can cost.\n"
        "- `jax.jit, module`: the baseline, `jax.jit` on the same Module, whose arrays are split "
        "off outside the call.\n"
        "- `filter_jit, on_retrace`: `filter_jit` with `on_retrace` and `max_traces` set. "
        "These options do not slow down a warm call.\n"
        "- The other columns: `jax.jit` on the same Equinox Module, Equinox's `filter_jit`, and "
        "`nnx.jit`.",
        "`python -m benchmarks.jit_edges` measures models with 1000 arrays or with lists and dicts "
        "inside, arguments from other libraries, exported programs, first calls, and memory. "
        "`make profile` shows where the time of a call goes; "
        "[profiling/README.md](../profiling/README.md) explains how to read it.",
    ),
    "layers": (
        "Layers",
        "`python -m benchmarks.layers` builds four networks with eqxlike, Equinox and NNX, and "
        "checks that the same weights give the same outputs and gradients. "
        "[Layers in detail](layers.md#why-they-are-fast) explains the differences.",
    ),
    "loops": (
        "Loops",
        "`python -m benchmarks.loops` compares the kinds of [loops](loops.md) with `jax.lax` and "
        "Equinox, in time and memory.",
    ),
}


def summary() -> str:
    """The text of `docs/measured.md`."""
    parts = [
        "# Measured",
        "These tables come from runs that are committed in "
        "[benchmarks/results](../benchmarks/results/). All columns of a table run in one process, "
        "in turn. A ratio is the median of the ratios of all rounds. Compare ratios within one run "
        "only, because times on a shared machine vary. "
        "[benchmarks/README.md](../benchmarks/README.md) lists all benchmarks, with tables of "
        "[whole networks](../benchmarks/README.md#whole-networks) on a CPU and on a GPU. "
        "`python -m benchmarks.table FILE` prints one report.",
    ]
    for name, (title, *texts) in QUOTED.items():
        path = RESULTS / f"{name}-cpu-jax-0.10.2.json"
        report = json.loads(path.read_text())
        for row in report["rows"]:
            row["notes"] = []  # notes do not name their row
        source = f"The run: [{path.name}](../benchmarks/results/{path.name})."
        tables = TITLED.sub(r"**\g<title>**\n\n", _plain(report))
        parts += [f"## {title}", *texts, source, tables]
    wrapped = (
        part if part.startswith(("- ", "**")) else textwrap.fill(part, 130) for part in parts
    )
    return "\n\n".join(wrapped) + "\n"


def menu() -> list[Any]:
    found = {name: _benchmark(name).title for name in _reports()}
    return [
        {"In short": SUMMARY.name},
        {trend.TITLE: trend.PATH},
        *({title: _path(name)} for name, title in found.items()),
    ]


def files() -> dict[str, str]:
    """The Markdown of each page, by path."""
    found = _reports()
    pages = {_path(name): _page(name, reports) for name, reports in found.items()}
    titles = {name: _benchmark(name).title for name in found}
    return {trend.PATH: trend.page(titles)} | pages


def _reports() -> dict[str, dict[str, pathlib.Path]]:
    """The reports of each benchmark, by device and version of JAX."""
    found: dict[str, dict[str, pathlib.Path]] = {name: {} for name in BENCHMARKS}
    for path in sorted(RESULTS.glob("*.json")):
        if match := NAME.fullmatch(path.stem):
            label = f"{match['device'].upper()}, jax {match['jax']}"
            found.setdefault(match["benchmark"], {})[label] = path
    return {name: reports for name, reports in found.items() if reports}


def _benchmark(name: str) -> Benchmark:
    """The description of a benchmark: by default its name and the docstring of its module."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    source = (ROOT / "benchmarks" / f"{name.replace('-', '_')}.py").read_text()
    said = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].replace("\n", " ")
    return Benchmark(name.replace("_", " ").replace("-", " ").capitalize(), said)


def _path(name: str) -> str:
    return f"measured/{name.replace('_', '-')}.md"


def _page(name: str, reports: Mapping[str, pathlib.Path]) -> str:
    benchmark = _benchmark(name)
    # Tables are wide, so the page has no table of contents.
    parts = ["---\nhide:\n  - toc\n---", f"# {benchmark.title}", benchmark.question]
    command = f"python -m benchmarks.{name.replace('-', '_')}"
    parts.append(f"`{command}` measures it again.")
    for label, path in reports.items():
        report = json.loads(path.read_text())
        body = f"{_machine(report, path)}\n\n{_tables(benchmark, report)}"
        parts.append(f'=== "{label}"\n\n{textwrap.indent(body, "    ")}')
    return "\n\n".join(parts) + "\n"


def _machine(report: Report, path: pathlib.Path) -> str:
    machine = report["machine"]
    versions = ", ".join(
        f"{name} {version}"
        for name, version in machine.items()
        if name not in NO_VERSION and version
    )
    date = machine["date"].partition("T")[0]
    return (
        f"{machine['device']} ({machine['cpu']}, {machine['cores']} cores), {date}, "
        f"{ages.described(report)}. {versions}. "
        f"[All numbers]({HOME}/benchmarks/results/{path.name}).\n{{ .machine }}"
    )


def _tables(benchmark: Benchmark, report: Report) -> str:
    text = benchmark.render(report)
    if "jaxlib" in report["machine"] and "rounds" in report["method"]:
        text = text.replace(table.describe(report), f"{_rounds(report)}.")
    return TITLED.sub(r"**\g<title>**\n\n", text)


def _rounds(report: Report) -> str:
    """The numbers of rounds, from the description of a report."""
    return table.describe(report).partition("; ")[2]


def index() -> str:
    """Links to the page of each benchmark. The site adds them to `docs/measured.md`."""
    lines = [
        "## All benchmarks",
        "",
        f"[How key figures changed]({trend.PATH}) from run to run has a page of its own.",
        "",
        "| benchmark | question | last run |",
        "| --- | --- | --- |",
    ]
    for name, reports in _reports().items():
        benchmark = _benchmark(name)
        dates = [json.loads(path.read_text())["machine"]["date"] for path in reports.values()]
        link = f"[{benchmark.title}]({_path(name)})"
        lines.append(f"| {link} | {benchmark.question} | {max(dates).partition('T')[0]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    SUMMARY.write_text(summary())
