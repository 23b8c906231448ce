"""The HTML page of a report is self-contained."""

import html.parser
import json
import re

import jax
import jax.numpy as jnp
import pytest

from eqxlike import graph, nn


class Parser(html.parser.HTMLParser):
    """Checks that elements nest, and collects the URLs that a browser would load."""

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


def page(gradient=False, function=lambda model, x: model(x)):
    stack = nn.ScanStack(lambda key: nn.Linear(3, 3, key=key), depth=4, key=jax.random.key(0))
    return graph.report(function, stack, jnp.ones(3), gradient=gradient).to_html()


@pytest.fixture(scope="module")
def text():
    return page()


@pytest.fixture(scope="module")
def with_gradient():
    return graphs_in(page(gradient=True))


def graphs_in(text):
    return json.loads(re.search(r"^const graphs = (.*);$", text, re.MULTILINE)[1])


def test_page_is_complete_and_loads_nothing(text):
    parser = Parser()
    parser.feed(text)
    assert (parser.open, parser.fetched) == ([], [])
    assert not re.search(r"\burl\(https?:|@import", text)
    # All placeholders of the template are replaced.
    assert "@@" not in text


def test_graph_nests_operations_in_layers_and_loops(text):
    drawn = graphs_in(text)["Function"]
    around = drawn["root"]["parts"][0]
    loop = around["parts"][0]
    assert (around["name"], loop["name"]) == ("model", "scan, 4 iterations")
    assert loop["parts"][0]["name"] == ".layers"
    assert [each[0] for each in drawn["operations"]] == ["dot_general", "add"]
    # An edge points from a value to the operation that reads it.
    assert drawn["edges"] == [[0, 1]]


def test_gradient_has_a_graph_of_its_own_with_each_operation_in_one_group(with_gradient):
    assert list(with_gradient) == ["Function", "With gradient"]
    drawn = with_gradient["With gradient"]

    def leaves(group):
        for part in group["parts"]:
            yield from [part] if isinstance(part, int) else leaves(part)

    assert '"backward"' in json.dumps(drawn["root"])
    assert list(leaves(drawn["root"])) == list(range(len(drawn["operations"])))


def test_names_cannot_end_the_script():
    def function(model, x):
        with jax.named_scope("</script><b><!--<script>"):
            return model(x)

    text = page(function=function)
    script = text.partition("<script>")[2].partition("</script>")[0]
    assert "<" not in re.search(r"^const graphs = (.*);$", script, re.MULTILINE)[1]
    assert "\\u003c" in script
