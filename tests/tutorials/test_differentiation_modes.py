"""The tutorial on modes of differentiation, in a short form."""

import pytest


@pytest.fixture
def module(script):
    return script("differentiation_modes")


@pytest.mark.parametrize(("name", "is_reversible"), [("rod", True), ("settled", False)])
def test_modes_are_right_but_where_there_is_none(module, name, is_reversible):
    question = module.rod(5) if name == "rod" else module.settled()
    *rows, chosen = module.answer(question, rounds=2).splitlines()[1:]
    verdicts = {row.split()[0]: row.split()[-1] for row in rows}
    expected = "ok" if is_reversible else "error"
    assert verdicts == {"Reverse()": expected, "Checkpointed()": expected, "Forward()": "ok"}
    assert is_reversible or chosen == "  chosen: Forward()"


def test_network_with_the_loop_inside_is_trained(module, capsys):
    module.train_settling(60)
    output = capsys.readouterr().out
    assert float(output.split("%")[0]) > 50
    assert "strength 0.50, was" not in output
