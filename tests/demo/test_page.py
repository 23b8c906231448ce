"""The page of the demo's report: whole by itself, and true to the report."""

import copy
import html.parser
import json
import re

import pytest

from eqxlike._cli._report import page_of

TIME = {"lower": 0.71, "median": 0.75, "upper": 0.82}
COLUMN = {"dispatch_us": 6543.21, "completion_us": 217.274, "rounds": 25, "calls": 7}
COLUMN |= {"dispatch_ratio": TIME, "completion_ratio": TIME}
SETTINGS = {"width_size": 8, "learning_rate": 0.01, "kl_weight": 1.0}
REPORT = {
    "stopped": "finished",
    "seed": 3,
    "quick": False,
    "device": "cpu",
    "machine": {
        "date": "2026-11-22T21:41:42+00:00",
        "eqxlike": "0.1.0",
        "jax": "0.10.2",
        "python": "3.11.7",
        "cores": 2,
    },
    "data": {
        "diabetes": {
            "examples": {"train": 309, "test": 2},
            "settings": SETTINGS,
            "trainings": {
                "bayesian": {"steps": 3, "planned": 4, "stopped": "finished", "message": "All."}
            },
            "metrics": {
                "bayesian": {"rmse": 52.1447, "nll": 5.38787, "coverage": 0.924812, "noise": 55.26},
                "ridge": {"rmse": 52.4, "nll": None, "coverage": 0.909774, "noise": 55.0746},
            },
            "reliability": {},
            "intervals": {
                name: {"truth": [1.5, 9.0], "mean": [2, 3], "lower": [1, 2], "upper": [3, 4]}
                for name in ("bayesian", "ridge")
            },
            "elbo": [-2.10161, None, -1.96607],
            "dispatch": {
                "training step": {"baseline": "jax.jit, module", "columns": {"filter_jit": COLUMN}}
            },
            "seconds": 56.3978,
        },
        "digits": {
            "examples": {"train": 1258, "test": 539},
            "settings": SETTINGS | {"kl_weight": 0.002},
            "trainings": {},
            "metrics": {"bayesian": {"accuracy": 0.979592, "nll": 0.0767854, "ece": 0.00487971}},
            "reliability": {
                "bayesian": {
                    "edges": [0.0, 0.5, 1.0],
                    "count": [0, 539],
                    "confidence": [None, 0.97],
                    "accuracy": [None, 0.98],
                }
            },
            "intervals": {},
            "elbo": [],
            "dispatch": {},
            "seconds": 83.9381,
        },
    },
}


class Parser(html.parser.HTMLParser):
    """Checks that elements nest; keeps their attributes, and the text outside of scripts."""

    EMPTY = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, page):
        super().__init__()
        self.open, self.attributes, self.text = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def numbers(value):
    if isinstance(value, dict | list):
        values = value.values() if isinstance(value, dict) else value
        return [number for each in values for number in numbers(each)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def embedded(page, name):
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page)
    return json.loads(found[1])


def test_nothing_is_fetched():
    page = page_of(REPORT)
    assert {name for name, _ in Parser(page).attributes}.isdisjoint({"src", "href", "srcset"})
    # The name of a space of elements is not an address to fetch.
    page = page.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?:|//\w|url\(|@import|fetch\(|XMLHttpRequest|import\(", page) == []


@pytest.mark.parametrize("part", ["metrics", "settings", "examples"])
def test_numbers_of_a_data_set_can_be_read_without_its_pictures(part):
    text = " ".join(Parser(page_of(REPORT)).text).replace("%", "")
    shown = {float(number) for number in re.findall(r"\d+\.?\d*", text)}
    for data in REPORT["data"].values():
        for number in numbers(data[part]):
            # As a table rounds it, shares as percentages.
            forms = {round(scale * number, places) for scale in (1, 100) for places in (0, 1, 4)}
            assert forms & shown, number


def test_times_of_calls_can_be_read_without_pictures():
    text = Parser(page_of(REPORT)).text
    for cell in ("diabetes, training step", "filter_jit", "6,543.2", "217.3", "0.75"):
        assert cell in text


def test_each_number_of_a_table_is_explained():
    page = page_of(REPORT)
    headings = re.findall(r"<th>(.+?)</th>", page)
    explained = set(re.findall(r"<dt>(.+?)</dt><dd>.+?</dd>", page))
    assert headings
    assert {heading.removesuffix(" (µs)") for heading in headings} <= explained


def test_what_looks_like_markup_is_text():
    report = copy.deepcopy(REPORT)
    bad = "</script><img src=x onerror=alert(1)>&@@REPORT@@\"'"
    report["device"] = report["machine"]["cpu"] = bad
    report["data"]["diabetes"]["metrics"][bad] = {"rmse": 1.0}
    report["data"]["diabetes"]["trainings"][bad] = {
        "steps": 1,
        "planned": 2,
        "stopped": "diverged",
        "message": bad,
    }
    page = page_of(report)
    parser = Parser(page)
    assert "onerror" not in dict(parser.attributes)
    assert bad in parser.text
    assert embedded(page, "report") == report


def test_training_that_did_not_finish_is_said_first():
    report = copy.deepcopy(REPORT)
    report["stopped"] = "diverged"
    report["data"]["diabetes"]["trainings"]["bayesian"] |= {
        "stopped": "diverged",
        "message": "NaN in step 4.",
    }
    warnings = re.findall(
        r'<p class="warning">(.+?)</p>', page_of(report).partition("<noscript")[0]
    )
    assert warnings == [
        "A training diverged. What is shown is its last good state.",
        "diabetes, Bayesian MLP: NaN in step 4.",
    ]


def test_run_that_was_interrupted_before_anything_was_reached_has_a_page():
    page = page_of(REPORT | {"stopped": "interrupted", "data": {}})
    assert "nothing yet" in page
    Parser(page)
