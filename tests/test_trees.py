"""One walk over nested containers, for everything that looks for tensors in them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.utils.rnn import pack_sequence
from torch.optim import SGD

import nanguard
from nanguard.state import optimizer_state
from nanguard.state.trees import leaves, mapped, named_tensors, tensors, tensors_returned

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Record:
    mask: Tensor
    length: int = 3


class Boxes(list[Any]):
    """Needs another argument, and has an attribute."""

    def __init__(self, size: int, boxes: Any) -> None:
        super().__init__(boxes)
        self.size = size


class Checked(Pair):
    """Refuses all but tensors."""

    def __new__(cls, left: Any, right: Any) -> Checked:
        assert isinstance(left, Tensor)
        return super().__new__(cls, left, right)


class Shared(MutableMapping[str, Any]):
    """A copy of it holds the same dict."""

    def __init__(self, *, inside: dict[str, Any]) -> None:
        self.inside = inside

    def __getitem__(self, key: str) -> Any:
        return self.inside[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inside[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inside[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inside)

    def __len__(self) -> int:
        return len(self.inside)


@dataclass
class Unset:
    mask: Tensor
    later: Tensor = field(init=False)


A, B, C = torch.zeros(1), torch.ones(2), torch.ones(2, dtype=torch.int64)
TREES: dict[str, tuple[Any, list[str]]] = {
    "tensor": (A, ["batch"]),
    "list": ([A, 1, "text", None, [B]], ["batch[0]", "batch[4][0]"]),
    "tuple": ((B, (A,)), ["batch[0]", "batch[1][0]"]),
    "namedtuple": (Pair(A, {"x": B}), ["batch.left", "batch.right['x']"]),
    "dict": ({"image": A, 7: [B, C]}, ["batch['image']", "batch[7][0]", "batch[7][1]"]),
    "ordered": (OrderedDict(b=B, a=A), ["batch['b']", "batch['a']"]),
    "default": (defaultdict(list, a=A), ["batch['a']"]),
    "user": (UserDict({"a": A}), ["batch['a']"]),
    "proxy": (MappingProxyType({"a": A}), ["batch['a']"]),
    "dataclass": ([Record(A)], ["batch[0].mask"]),
    "class of records": (Record, []),
    "a field that is not set": (Unset(A), ["batch.mask"]),
    "packed": (pack_sequence([B, B[:1]]), ["batch.data", "batch.batch_sizes"]),
    "checked": (Checked(A, {"x": B}), ["batch.left", "batch.right['x']"]),
    "list of its own": (Boxes(3, [A, B]), ["batch[0]", "batch[1]"]),
    "result": (torch.max(torch.ones(2, 2), 1), ["batch[0]", "batch[1]"]),
    "nothing": (None, []),
}


@pytest.mark.parametrize("name", TREES)
def test_tensors_are_found_in_order_under_the_names_of_the_program(name: str) -> None:
    tree, names = TREES[name]
    found = dict(named_tensors(tree))
    assert list(found) == names
    assert all(eval(path, {"batch": tree}) is tensor for path, tensor in found.items())
    assert [id(tensor) for tensor in tensors(tree)] == [id(tensor) for tensor in found.values()]


@pytest.mark.parametrize("name", TREES)
def test_a_mapped_tree_keeps_its_kind_and_leaves_the_first_alone(name: str) -> None:
    tree, names = TREES[name]
    new = mapped(tree, lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else None)
    assert type(new) is type(tree)
    assert [path for path, _ in named_tensors(new)] == names
    for old, one_more in zip(tensors(tree), tensors(new), strict=True):
        assert old is not one_more
        torch.testing.assert_close(one_more, old + 1)
    assert (new is tree) == (not names)
    assert mapped(tree, lambda leaf: None) is tree


def test_a_container_whose_copy_shares_what_it_holds_is_left_alone() -> None:
    tree = Shared(inside={"a": A, "b": [B]})
    new = mapped(tree, lambda leaf: "a token" if isinstance(leaf, Tensor) else None)
    assert new == {"a": "a token", "b": ["a token"]}
    assert tree["a"] is A
    assert tree["b"][0] is B


class Frozen(dict[str, Any]):
    """Cannot be written to, so that ``copy.copy`` fails too."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


class Converting(UserDict[str, Any]):
    """Gives another object for each key at each time."""

    num_writes = 0

    def __getitem__(self, key: str) -> Any:
        return [super().__getitem__(key)]

    def __setitem__(self, key: str, value: Any) -> None:
        self.num_writes += 1
        super().__setitem__(key, value)


def test_a_container_that_cannot_be_written_to_becomes_a_plain_one() -> None:
    """It is given to a module, say: the program must not end because of it."""
    for tree in (Frozen(a=A), immutable_dict(a=A), immutable_list([A])):
        new = mapped(tree, lambda leaf: "a token" if isinstance(leaf, Tensor) else None)
        assert new == (["a token"] if isinstance(tree, list) else {"a": "a token"})
        assert next(tensors(tree)) is A


def test_a_container_of_the_program_is_not_written_to() -> None:
    tree = Converting(a=A)
    mapped(tree, lambda leaf: "a token" if isinstance(leaf, Tensor) else None)
    assert tree.num_writes == 1


def test_no_class_is_made_of_what_stands_for_tensors() -> None:
    """It may look at them at once, as a packed sequence does."""
    for tree in (pack_sequence([B]), Checked(A, B), Boxes(3, [A])):
        new = mapped(tree, lambda leaf: "a token" if isinstance(leaf, Tensor) else None)
        assert type(new) is type(tree)
        assert "a token" in new
    assert mapped(Boxes(3, [A]), lambda leaf: "a token").size == 3


def test_dotted_names_count_the_places_of_tuples() -> None:
    state = {"exp_avg": A, "history": [B, Pair(A, C)]}
    names = [name for name, _ in optimizer_state.leaves(state, "fc.weight")]
    assert names == [
        "fc.weight.exp_avg",
        "fc.weight.history.0",
        "fc.weight.history.1.0",
        "fc.weight.history.1.1",
    ]


def test_leaves_are_all_that_is_no_container() -> None:
    assert list(leaves({"a": [1, (2.5, None)], "b": Record, "c": torch.float16})) == [
        1,
        2.5,
        None,
        Record,
        torch.float16,
    ]


def test_a_result_may_be_a_container_with_attributes() -> None:
    class Output(OrderedDict[str, Tensor]):
        loss: Tensor

    output = Output(logits=B)
    output.loss = A
    assert [id(tensor) for tensor in tensors_returned(output)] == [id(B), id(A)]


class Shy(Mapping[str, Any]):
    """Only single entries can be read."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("read single entries only")

    def __len__(self) -> int:
        return len(self.entries)


class ShyList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("read single entries only")


class OfShy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, first: Shy, second: ShyList) -> Shy:
        return Shy(out=self.inner(first["x"]) + second[0])


def test_what_a_container_raises_as_it_is_read_does_not_reach_the_program() -> None:
    shy = Shy(x=2.0)
    assert list(leaves([1.0, shy])) == [1.0, shy]
    assert list(tensors(ShyList([torch.ones(1)]))) == []
    with nanguard.install() as autopilot:
        model = OfShy()
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.full((3, 4), float("nan") if step == 2 else 1.0)
            out = model(Shy(x=x), ShyList([torch.ones(3, 1)]))["out"]
            optimizer.zero_grad()
            out.mean().backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert incident.outcome.verdict.reading.step == 2
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
