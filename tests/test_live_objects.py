"""All objects of a class, found while other threads go on with their work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from torch import nn

from nanguard.state.live_objects import live_objects


class Kept(nn.Module):
    """Nothing else in these tests is one."""


class Derived(Kept):
    """Is one as well."""


class Proxy:
    """Stands for something that is expensive to make, or must not be made."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise AssertionError("nobody may ask for it")


def test_objects_of_a_class_and_of_its_subclasses_are_found() -> None:
    proxy, kept, derived = Proxy(), Kept(), Derived()
    found = live_objects(Kept)
    assert {id(each) for each in found} == {id(kept), id(derived)}
    assert type(proxy) is Proxy


def test_classes_are_no_objects_of_theirs() -> None:
    class Unused(nn.Module):
        pass

    assert live_objects(Unused) == []


def test_a_tuple_that_another_thread_is_making_can_be_finished() -> None:
    begun, may_end, made = threading.Event(), threading.Event(), []

    def numbers() -> Iterator[int]:
        yield 1
        begun.set()
        may_end.wait()

    thread = threading.Thread(target=lambda: made.append(tuple(numbers())))

    class LetsOthersRun(type):
        def __subclasscheck__(cls, other: type) -> bool:
            may_end.set()
            thread.join()
            return False

    class Asked(metaclass=LetsOthersRun):
        pass

    thread.start()
    begun.wait()
    assert live_objects(Asked) == []
    assert made == [(1,)]
