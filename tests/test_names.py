"""Renamed and removed names of earlier versions."""

import importlib
import re

import pytest

import eqxlike
from eqxlike import _names


def test_renamed_name_warns_and_gives_the_new_object(monkeypatch):
    monkeypatch.setitem(_names.RENAMED, "eqxlike.train.old_name", "eqxlike.nn.Linear")
    for old, new in _names.RENAMED.items():
        package, _, name = old.rpartition(".")
        new_package, _, new_name = new.rpartition(".")
        with pytest.warns(DeprecationWarning, match=re.escape(new)):
            found = getattr(importlib.import_module(package), name)
        assert found is getattr(importlib.import_module(new_package), new_name)


@pytest.mark.parametrize("old", sorted(_names.REMOVED))
def test_error_of_a_removed_name_names_the_replacement(old):
    package, _, name = old.rpartition(".")
    with pytest.raises(AttributeError, match=re.escape(_names.REMOVED[old])):
        getattr(importlib.import_module(package), name)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'eqxlike' has no attribute 'nonsense'"):
        importlib.import_module("eqxlike").nonsense  # noqa: B018


def test_names_of_pytorch_say_what_to_use():
    for name, hint in _names.OF_PYTORCH.items():
        with pytest.raises(AttributeError, match=re.escape(hint)):
            getattr(eqxlike.nn, name)
