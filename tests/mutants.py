"""Mutation tests: makes small mistakes in the package, and lists the tests that find them.

    make mutants                                  # the committed set, up to the first failure
    make mutants ARGS="--seed 4 --count 120 --all --out table.json"

The script first runs the suite under coverage, to record which tests execute each line. The option
`--coverage` is the folder of this record; an existing record is used again. A mutant changes one
expression in a copy of the tree. The script runs the tests that execute the expression, the fastest
first, until one fails or the tests would take longer than `--budget-s`. If a mutant does not change
the behaviour of the program, add `"equivalent": "reason"` to its row in the table. Later runs keep
this entry.
"""

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections.abc import Iterator

import coverage

PARTS = (
    *("_module", "_partition", "_pytree", "_transforms", "ad", "loops", "nn"),
    *("_export", "bayes", "debug", "graph", "internal", "train"),
)
SWAPS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--all", action="store_true", help="continue after the first failure")
    parser.add_argument("--budget-s", type=float, default=240, help="time of all tests of a mutant")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--coverage", type=pathlib.Path, default=".pytest_cache/mutants")
    parser.add_argument("--only", help="regular expression of the names of mutants to run")
    parser.add_argument("--out", type=pathlib.Path, default="tests/mutants.json")
    options = parser.parse_args()

    root = pathlib.Path.cwd()
    if not (options.coverage / "data").exists():
        record(options.coverage)
    executed, seconds = read_record(options.coverage)
    mutants = draw(root, options.seed, options.count)
    chosen = [each for each in mutants if re.search(options.only or "", each.name)]
    before = json.loads(options.out.read_text())["mutants"] if options.out.exists() else []
    notes = {each["name"]: each["equivalent"] for each in before if "equivalent" in each}

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trees = queue.SimpleQueue()
        for number in range(options.workers):
            trees.put(copy_tree(root, pathlib.Path(folder, str(number))))
        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            runs = [
                pool.submit(judge, each, trees, executed, seconds, options.budget_s, options.all)
                for each in chosen
            ]
            for run in concurrent.futures.as_completed(runs):
                row = run.result()
                if row["name"] in notes:
                    row["equivalent"] = notes[row["name"]]
                rows.append(row)
                print(f"{len(rows):4} {row['outcome']:9} {row['seconds']:6.1f} s  {row['name']}")
                write(options, sorted(rows, key=lambda row: row["name"]))
    print(summary(rows))


@dataclasses.dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    end_line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.after!r}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def draw(root: pathlib.Path, seed: int, count: int) -> list[Mutant]:
    """Draws random mutants: two from each part of the package, the others from all parts."""
    chance = random.Random(seed)
    by_part = {}
    for part in PARTS:
        place = root / "eqxlike" / part
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        by_part[part] = [each for file in files for each in mutants_of(file, root)]
        chance.shuffle(by_part[part])
    drawn = [mutants.pop() for mutants in by_part.values() for _ in range(2)]
    others = [each for mutants in by_part.values() for each in mutants]
    chance.shuffle(others)
    return drawn + others[: count - len(drawn)]


def mutants_of(file: pathlib.Path, root: pathlib.Path) -> Iterator[Mutant]:
    """All mutants of a file, except in annotations, messages and docstrings."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in executable_nodes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        for after in changes(node):
            yield Mutant(
                str(file.relative_to(root)), node.lineno, node.end_lineno, start, end, before, after
            )


def executable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_message = isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr)
            if isinstance(child, ast.AST) and not is_message:
                if isinstance(child, ast.expr | ast.stmt):
                    yield child
                yield from executable_nodes(child)


def changes(node: ast.AST) -> Iterator[str]:
    """The replacements of a node, as source."""
    match node:
        case ast.Compare(ops=[operator]):
            yield as_text(node, ops=[SWAPS[type(operator)]()])
        case ast.BoolOp(op=operator):
            yield as_text(node, op=SWAPS[type(operator)]())
        case ast.BinOp(op=operator) if type(operator) in SWAPS:
            yield as_text(node, op=SWAPS[type(operator)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield as_text(node, body=orelse, orelse=body)
        # Removing `strict` changes nothing: it only checks what the preceding code ensures.
        case ast.Call(keywords=[*_, ast.keyword(arg=str(name))]) if name != "strict":
            yield as_text(node, keywords=node.keywords[:-1])
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None"
        case ast.Break() | ast.Continue():
            yield ast.unparse(SWAPS[type(node)]())
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "pass"


def as_text(node: ast.expr, **fields) -> str:
    values = {name: getattr(node, name) for name in node._fields}
    return f"({ast.unparse(type(node)(**{**values, **fields}))})"


def record(folder: pathlib.Path) -> None:
    """Runs the whole suite, and saves which tests execute each line and how long they take."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coveragerc").write_text("[run]\nsource = eqxlike\ndisable_warnings = no-ctracer\n")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile"),
        *("--cov", "--cov-context=test", f"--cov-config={folder}/coveragerc", "--cov-report="),
        f"--junitxml={folder}/durations.xml",
    ]
    subprocess.run(command, env={**os.environ, "COVERAGE_FILE": str(folder / "data")})


def read_record(folder: pathlib.Path) -> tuple[dict[tuple[str, int], set[str]], dict[str, float]]:
    """The test functions that execute each line, and the total time of each test function.

    Leaves out tests that did not pass.
    """
    seconds = collections.Counter()
    failed = set()
    for case in xml.etree.ElementTree.parse(folder / "durations.xml").iter("testcase"):
        name = case.get("classname") + "." + case.get("name").partition("[")[0]
        seconds[name] += float(case.get("time"))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
    data = coverage.CoverageData(str(folder / "data"))
    data.read()
    executed = collections.defaultdict(set)
    times = {}
    for file in data.measured_files():
        path = "eqxlike/" + file.rpartition("/eqxlike/")[2]
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                test = context.partition("|")[0].partition("[")[0]
                name = test.replace("/", ".").replace(".py::", ".").replace("::", ".")
                if test and name not in failed:
                    executed[path, line].add(test)
                    times[test] = seconds[name]
    return executed, times


def copy_tree(root: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """Copies all files that git tracks, and returns the path of the copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


def judge(mutant, trees, executed, seconds, budget_s, goes_on) -> dict:
    """Applies a mutant to a copy of the tree, and runs the tests that execute its lines."""
    lines = range(mutant.line, mutant.end_line + 1)
    tests = set().union(*(executed.get((mutant.path, line), ()) for line in lines))
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        if (total := total + seconds[test]) <= budget_s:
            chosen.append(test)
    tree = trees.get()
    started = time.monotonic()
    file = tree / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.applied(source))
    try:
        found_by = failures(tree, chosen, budget_s, goes_on) if chosen else []
    finally:
        file.write_bytes(source)
        trees.put(tree)
    return {
        "name": mutant.name,
        "outcome": "found" if found_by else "survived" if chosen else "unreached",
        "seconds": round(time.monotonic() - started, 1),
        "executed_by": len(tests),
        "ran": len(chosen),
        "num_found_by": len(found_by),
        "found_by": found_by[:5],
    }


def failures(tree: pathlib.Path, tests: list[str], budget_s: float, goes_on: bool) -> list[str]:
    """The tests that fail, including the test in which the process hangs or crashes."""
    (tree / "chosen-tests").write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", *([] if goes_on else ["-x"]), "@chosen-tests"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(tree.parent / "compiled"))
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    # The limit is generous, because a mutant may be slow and the first run starts slowly.
    timer = threading.Timer(60 + 2 * budget_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    found, at = {}, "collection"
    with process:
        for line in process.stdout:
            if line.startswith("tests/"):
                at = re.split(r"[\[ ]", line)[0].strip()
                if re.search(r" (FAILED|ERROR)\b", line):
                    found[at] = None
    timer.cancel()
    # Status 1 means that tests failed. Statuses other than 0 and 1 mean a crash or a timeout.
    if process.returncode not in (0, 1):
        found[at] = None
    return list(found)


def write(options: argparse.Namespace, rows: list[dict]) -> None:
    about = {
        "seed": options.seed,
        "count": options.count,
        "goes_on": options.all,
        "budget_s": options.budget_s,
        "jax": importlib.metadata.version("jax"),
        "python": platform.python_version(),
        "mutants": rows,
    }
    options.out.write_text(json.dumps(about, indent=1) + "\n")


def summary(rows: list[dict]) -> str:
    """A table with a line for each part of the package, and a line for the total."""
    lines = [f"{'part':12} mutants  found  equivalent  survived  unreached"]
    parts = collections.defaultdict(list)
    for row in rows:
        parts[row["name"].split("/")[1].removesuffix(".py").partition(".")[0]].append(row)
    for part, those in [*sorted(parts.items()), ("all", rows)]:
        kinds = collections.Counter(
            "equivalent" if "equivalent" in row else row["outcome"] for row in those
        )
        lines.append(
            f"{part:12} {len(those):7} {kinds['found']:6} {kinds['equivalent']:11}"
            f" {kinds['survived']:9} {kinds['unreached']:10}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
