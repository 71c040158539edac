"""All objects of a class that are alive, whoever made them."""

from __future__ import annotations

import gc
from itertools import chain, starmap
from typing import Any


def live_objects(kind: type) -> list[Any]:
    """Also those of subclasses, but not those that the program has frozen (``gc.freeze``). Slow: looks at all, twice.

    Python's C code holds all objects for a moment, in which no other thread runs; code of ours never does. Otherwise a
    tuple that another thread is making could have a second owner, and Python refuses to finish such a tuple.
    """
    # type and not isinstance, which asks proxies for their class: some of them then do something.
    types = set(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
    kinds = {each for each in types if issubclass(each, kind)}
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
