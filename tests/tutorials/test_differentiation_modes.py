"""The tutorial on modes of differentiation, in a short form."""

import pytest


@pytest.fixture
def module(script):
    return script("differentiation_modes")


def test_modes_are_right_but_where_there_is_none(module):
    *rows, chosen = module.answer(module.settled(), rounds=1).splitlines()[1:]
    verdicts = {row.split()[0]: row.split()[-1] for row in rows}
    assert verdicts == {"Reverse()": "error", "Checkpointed()": "error", "Forward()": "ok"}
    assert chosen == "  chosen: Forward()"


def test_network_with_the_loop_inside_is_trained(module, capsys):
    module.train_settling(60)
    output = capsys.readouterr().out
    assert float(output.split("%")[0]) > 50
    assert "strength 0.50, was" not in output
