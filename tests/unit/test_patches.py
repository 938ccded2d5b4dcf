"""Names that are replaced for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rl_safe_workers.adapters.patches import replaced


def test_a_name_is_replaced_for_the_body_and_put_back_after_an_error() -> None:
    owner = SimpleNamespace(name=1)
    replacing = replaced(owner, "name", lambda value: value + 1)
    replacing.__enter__()
    assert owner.name == 2
    assert not replacing.__exit__(RuntimeError, RuntimeError(), None)
    assert owner.name == 1


def test_a_name_that_is_absent_is_there_for_the_body_alone() -> None:
    owner = SimpleNamespace()
    with replaced(owner, "name", lambda value: value + 1, absent=1):
        assert owner.name == 2
    assert not hasattr(owner, "name")


def test_a_name_that_is_there_goes_before_the_one_for_its_absence() -> None:
    owner = SimpleNamespace(name=5)
    with replaced(owner, "name", lambda value: value + 1, absent=1):
        assert owner.name == 6
    assert owner.name == 5


def test_a_name_of_the_class_is_replaced_for_one_object_alone() -> None:
    class Owner:
        def name(self) -> int:
            return 1

    owner = Owner()
    with replaced(owner, "name", lambda value: lambda: value() + 1):
        assert (owner.name(), Owner().name()) == (2, 1)
    assert vars(owner) == {}


def test_a_name_that_is_absent_without_notice_is_an_error() -> None:
    with pytest.raises(AttributeError), replaced(SimpleNamespace(), "name", lambda value: value):
        pass
