"""The page of a report holds all that it shows."""

import html.parser
import json
import re

import jax
import jax.numpy as jnp
import pytest

from eqxlike import graph, nn


class Parser(html.parser.HTMLParser):
    """Checks that elements nest, and keeps what would be fetched."""

    EMPTY = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self):
        super().__init__()
        self.open, self.fetched = [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(gradient=False, function=None):
    stack = nn.ScanStack(lambda key: nn.Linear(3, 3, key=key), depth=4, key=jax.random.key(0))
    function = function or (lambda model, x: model(x))
    return graph.report(function, stack, jnp.ones(3), gradient=gradient).to_html()


def graphs_in(text):
    return json.loads(re.search(r"^const graphs = (.*);$", text, re.MULTILINE)[1])


def test_page_is_whole_and_fetches_nothing():
    parser = Parser()
    text = page()
    parser.feed(text)
    assert (parser.open, parser.fetched) == ([], [])
    assert not re.search(r"\burl\(https?:|@import", text)


def test_no_mark_of_the_template_is_left():
    assert "@@" not in page()


def test_graph_nests_operations_in_layers_and_loops():
    drawn = graphs_in(page())["Function"]
    around = drawn["root"]["parts"][0]
    loop = around["parts"][0]
    assert (around["name"], loop["name"]) == ("model", "scan, 4 turns")
    assert loop["parts"][0]["name"] == ".layers"
    assert [each[0] for each in drawn["operations"]] == ["dot_general", "add"]


def test_edges_lead_from_what_is_read_to_the_reader():
    assert graphs_in(page())["Function"]["edges"] == [[0, 1]]


def test_gradient_has_a_graph_of_its_own():
    drawn = graphs_in(page(gradient=True))
    assert list(drawn) == ["Function", "With gradient"]
    names = json.dumps(drawn["With gradient"]["root"])
    assert '"backward"' in names


def test_each_operation_stands_in_one_group():
    drawn = graphs_in(page(gradient=True))["With gradient"]

    def leaves(group):
        for part in group["parts"]:
            yield from [part] if isinstance(part, int) else leaves(part)

    assert list(leaves(drawn["root"])) == list(range(len(drawn["operations"])))


@pytest.mark.parametrize("name", ["</script><b>", "<!--<script>"])
def test_names_neither_end_the_script_nor_go_on_after_it(name):
    def function(model, x):
        with jax.named_scope(name):
            return model(x)

    text = page(function=function)
    script = text.partition("<script>")[2].partition("</script>")[0]
    assert "<" not in re.search(r"^const graphs = (.*);$", script, re.MULTILINE)[1]
    assert "\\u003c" in script
