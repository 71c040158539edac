"""Record every op of a step (forward, backward and update) and the path of non-finite values.

An op with a non-finite output is an event. *birth*: it made the value from finite ones. *turned*: it made a NaN from
infinities. *given*: the value is a constant (a mask, an initial value) or uninitialised memory. *outside*: the value
is data: it existed before the step, or a tensor was made of an array or a list. *heir*: the value comes from an input.
The trace keeps numbers, not tensors, and identifies a tensor by its storage, because it sees every op that makes or
writes one.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from nanguard import _compat
from nanguard.diagnosis.data_events import data_event, has_posinf
from nanguard.diagnosis.evidence import gather, new_places
from nanguard.diagnosis.look import NOTHING, Look, can_hold_nan, can_look, look
from nanguard.diagnosis.plans import LIFTS, Plan, belong, forward_op, plan_of
from nanguard.diagnosis.provenance import (
    BATCH,
    OTHER,
    PARAMETER,
    EventPhase,
    Kind,
    Leaf,
    Note,
    Swallow,
    TraceEvent,
)
from nanguard.source.frames import Site, find_site
from nanguard.source.modules import Modules
from nanguard.state.trees import leaves, tensors

log = logging.getLogger("nanguard")

_MOST_BIRTHS_WITH_EVIDENCE = 48
_LARGEST_COPY = 1 << 26


class Trace(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records ops; ``modules`` finds the module of an op.

    ``generators`` are the program's random generators that ops used, with their states before. ``save`` is called once
    with the name and tensor of each parameter, buffer or optimizer state, before the user's program writes to it
    outside the optimizer, and without a name for other tensors from before the step.
    """

    def __init__(self, modules: Modules, save: Callable[[str, Tensor], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Note] = []
        self.events: list[TraceEvent] = []
        self.swallowed: list[Swallow] = []
        self.writes: dict[str, Note] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self.in_update = False
        self.failure: Exception | None = None
        self.modules = modules
        self._save = save
        self._plans: dict[Any, Plan] = {}
        self._leaves: dict[int, Leaf] = {}
        self._held: list[Any] = []
        self._watched: dict[int, str] = {}
        self._made: dict[int, Note] = {}
        self._written_first: set[int] = set()  # memory from before the step, which the step has not read yet
        self._bad: dict[int, tuple[TraceEvent, ...]] = {}
        self._sites: dict[tuple[int, int], tuple[str, Site]] = {}
        self._main = threading.get_ident()

    def __enter__(self) -> Trace:
        self.modules.listen()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.modules.stop()

    # ---- values from before the step -----------------------------------------------------------------------------

    def know(self, name: str, tensor: Tensor, roots: int, *, watched: bool = False, owner: str = "") -> None:
        """Register a tensor by name; ``owner`` is the parameter of a gradient or of optimizer state."""
        key = _compat.storage_key(tensor)
        leaf = Leaf(name, roots, look(tensor), owner)
        self._leaves[key] = leaf
        self._held.append(_compat.storage_of(tensor))  # keeps its memory from being reused
        self._made.pop(key, None)
        if watched:
            self._watched[key] = name
        if not leaf.look.is_finite:
            leaf.event = self._outside(name, leaf, tensor, owner)
            self._bad[key] = (leaf.event,)

    def _outside(self, name: str, leaf: Leaf, tensor: Tensor, owner: str = "") -> TraceEvent:
        note = Note(-1, "", "forward", None, "", owner=owner, roots=leaf.roots)
        note.dtype, note.shape, note.look = str(tensor.dtype), tuple(tensor.shape), leaf.look
        event = data_event(note, tensor)
        event.origin, event.storage = name, _compat.storage_key(tensor)
        self._held.append(_compat.storage_of(tensor))
        self.events.append(event)
        return event

    # ---- queries -------------------------------------------------------------------------------------------------

    def events_of(self, tensor: Tensor) -> tuple[TraceEvent, ...]:
        """The events that the non-finite values of a tensor come from."""
        return self._bad.get(_compat.storage_key(tensor), ())

    def is_overwritten(self, event: TraceEvent) -> bool:
        """Whether no memory holds what the event made any more."""
        return not any(event is each for events in self._bad.values() for each in events)

    def note_of(self, tensor: Tensor) -> Note | Leaf | None:
        return self._parent(_compat.storage_key(tensor))

    def forward_site(self, sequence: int, node: str) -> Site | None:
        """The site of the forward op that made a node of the graph."""
        mine = self._sites.get((self._main, sequence))
        if mine is not None and belong(mine[0], node):
            return mine[1]
        for (_, number), (op, site) in self._sites.items():
            if number == sequence and belong(op, node):
                return site
        return None if mine is None else mine[1]

    # ---- recording -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], (int, float)) and str(_compat.schema_arguments(func)[0].type) == "Tensor":
            args = (torch.tensor(args[0]), *args[1:])  # torch passes a constant as a number, but does not accept it
        if _compat.is_recording():  # our own reads would be recorded too
            return func(*args, **kwargs)
        if _compat.makes_zeros_without_memory(func):
            # It has no memory, but kernels called from here would still read it.
            return torch.zeros(*args, **kwargs)
        plan = self._plans.get(func) or self._plans.setdefault(func, plan_of(func))
        node = _compat.current_node()
        site = find_site(self.modules, in_engine=node is not None)
        if site.is_stand_in and site.module is None:
            site = replace(site, module=self._module_of(args))
        self._remember_node(plan, site, node)
        if plan.is_view:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self.generators:
            self.generators[id(generator)] = generator, generator.get_state()
        written = [args[i] for i in plan.written if i < len(args)] + [kwargs.get(name) for name in plan.written_kwargs]
        written = list(tensors(written))
        before = self._before(written)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self._follow_raising(plan, site, node, args, kwargs)
            raise
        try:
            self._follow(func, plan, site, node, args, kwargs, written, before, result)
        except Exception as error:  # tracing must not make the step fail
            if self.failure is None:
                log.debug("an op could not be followed: %s", plan.op, exc_info=True)
            self.failure = self.failure or error
        return result

    def _follow_raising(self, plan: Plan, site: Site, node: Any, args: Any, kwargs: Any) -> None:
        """An op that raises, maybe because of what it was given, is the last one that used it."""
        inputs = list(plan.named_tensors(args, kwargs))
        sources = [self._parent(_compat.storage_key(tensor)) for _, tensor in inputs]
        note = self._note(plan, site, node, args, kwargs, sources)
        bad = self._bad_inputs(note, inputs, {})
        if bad:
            parents = tuple({id(event): event for _, events in bad for event in events}.values())
            self.events.append(TraceEvent(note, "heir", any(event.has_nan for event in parents), parents))

    def _remember_node(self, plan: Plan, site: Site, node: Any) -> None:
        """The node of an op is made right before it runs; ``torch.func.grad`` makes one per level."""
        number = _compat.next_sequence_nr()
        keys = [(threading.get_ident(), (number or 0) - level) for level in range(1, 5)]
        if not number or keys[0] in self._sites:
            return
        if site.by_engine and not site.in_user_code and node is not None:
            site = self._site_of(node) or site
        for key in itertools.takewhile(lambda key: key not in self._sites, keys):
            self._sites[key] = (plan.op, site)

    def _site_of(self, node: Any) -> Site | None:
        number = _compat.sequence_nr(node)
        return None if number is None else self.forward_site(number, forward_op(node))

    def _before(self, written: list[Tensor]) -> dict[int, Tensor]:
        """Copies of the tensors that an op is about to write to."""
        copies: dict[int, Tensor] = {}
        for tensor in written:
            key = _compat.storage_key(tensor)
            name = self._watched.get(key)
            if self._save is not None and not self.in_update and name not in self.writes and key not in self._made:
                self._save(name or "", tensor)
            if can_look(tensor) and tensor.numel() <= _LARGEST_COPY:
                copies[id(tensor)] = tensor.detach().clone()
        return copies

    def _follow(
        self,
        func: Any,
        plan: Plan,
        site: Site,
        node: Any,
        args: Any,
        kwargs: Any,
        written: list[Tensor],
        before: dict[int, Tensor],
        result: Any,
    ) -> None:
        made = [t for t in tensors(result) if not any(t is w for w in written)][: plan.num_results]
        outputs = written + made
        if not outputs:
            return
        inputs = [] if plan.is_empty or plan.op in LIFTS else list(plan.named_tensors(args, kwargs))
        inputs = [each for each in inputs if each[0] not in plan.unread]
        sources = [self._parent(_compat.storage_key(tensor)) for _, tensor in inputs]
        note = self._note(plan, site, node, args, kwargs, sources)
        bad = self._bad_inputs(note, inputs, before)
        worst: list[tuple[Tensor, Look]] = []
        self._written_first |= {key for key in map(_compat.storage_key, written) if self._parent(key) is None}
        self._written_first -= set(map(_compat.storage_key, made))
        for tensor in outputs:
            key = _compat.storage_key(tensor)
            seen = look(tensor)
            if note.look is NOTHING and can_look(tensor):
                note.look, note.dtype, note.shape = seen, str(tensor.dtype), tuple(tensor.shape)
            elif tensor.numel() == 0 and not note.shape:
                note.shape = tuple(tensor.shape)
            self._made[key] = note
            if plan.op in LIFTS and tensor.ndim:  # one number is a constant
                note.roots = BATCH
            name = self._watched.get(key)
            if name is not None and not self.in_update:
                self.writes.setdefault(name, note)
            if not seen.is_finite:
                worst.append((tensor, seen))
            elif _covers(tensor):
                self._bad.pop(key, None)
        if not worst:
            if bad and any(map(can_look, outputs)):
                self.swallowed.append(Swallow(note, tuple(event for _, events in bad for event in events)))
            return
        event = self._event(func, plan, note, args, kwargs, inputs, sources, before, bad, worst)
        self.events.append(event)
        for tensor, _ in worst:
            key = _compat.storage_key(tensor)
            old = () if _covers(tensor) else self._bad.get(key, ())
            self._bad[key] = (*old[-7:], event)

    def _note(
        self,
        plan: Plan,
        site: Site,
        node: Any,
        args: Any,
        kwargs: Any,
        sources: list[Note | Leaf | None],
    ) -> Note:
        phase: EventPhase = "backward" if site.by_engine else "forward"
        if self.in_update:
            phase = "optimizer"
        made_by = self._site_of(node) if site.by_engine else None
        place = site.place if site.in_user_code or not site.by_engine else (made_by.place if made_by else None)
        module = site.module if site.module is not None else (made_by.module if made_by else None)
        parents = tuple(source for source in sources if source is not None)
        note = Note(
            index=len(self.notes),
            op=plan.op,
            phase=phase,
            place=place,
            module=module or "",
            scalars=tuple(_numbers((args, kwargs))),
            parents=parents,
            node=forward_op(node) if site.by_engine and node is not None else "",
            in_user_code=site.in_user_code,
            is_custom=isinstance(node, BackwardCFunction),
            in_place=bool(plan.written),
            home=(site.home if site.home is not None else made_by.home if made_by else None) or "",
        )
        for parent in parents:
            note.roots |= parent.roots
        note.owner = next((p.owner for p in parents if p.owner), "") if self.in_update else ""
        self.notes.append(note)
        return note

    def _module_of(self, args: Any) -> str | None:
        """The module whose parameters an op is given with other tensors, as a layer is; None if there is none."""
        names = [getattr(self._parent(_compat.storage_key(tensor)), "name", "") for tensor in tensors(args)]
        owned = {name.partition(" ")[2].rpartition(".")[0] for name in names if name.startswith("parameter ")}
        is_layer = len(owned) == 1 and not all(name.startswith("parameter ") for name in names)
        return owned.pop() if is_layer else None

    def _parent(self, key: int) -> Note | Leaf | None:
        return self._made.get(key) or self._leaves.get(key)

    def _bad_inputs(
        self, note: Note, inputs: list[tuple[str, Tensor]], before: dict[int, Tensor]
    ) -> list[tuple[Tensor, tuple[TraceEvent, ...]]]:
        """The non-finite inputs, each with its events."""
        bad = []
        for name, tensor in inputs:
            if not can_hold_nan(tensor):
                continue
            key = _compat.storage_key(tensor)
            if self._is_unknown(key, before.get(id(tensor), tensor)):
                self._made.pop(key, None)
                what = f"{name} of {note.op}, which no op of the step was seen to make,"
                self._leaves[key] = leaf = Leaf(what, OTHER, NOTHING, storage=key)
                leaf.look = look(before.get(id(tensor), tensor))
                note.roots |= OTHER
                note.parents = (*note.parents, leaf)
                if not leaf.look.is_finite:
                    leaf.event = self._outside(leaf.name, leaf, tensor)
                    self._bad[key] = (leaf.event,)
            events = self._bad.get(key)
            if events and not look(before.get(id(tensor), tensor)).is_finite:
                bad.append((tensor, events))
        return bad

    def _is_unknown(self, key: int, tensor: Tensor) -> bool:
        """True if no op was seen to make what a tensor holds, though one may have written to another part of it."""
        if key not in self._made:
            return key not in self._leaves
        return key in self._written_first and key not in self._bad and not look(tensor).is_finite

    def _event(
        self,
        func: Any,
        plan: Plan,
        note: Note,
        args: Any,
        kwargs: Any,
        inputs: list[tuple[str, Tensor]],
        sources: list[Note | Leaf | None],
        before: dict[int, Tensor],
        bad: list[tuple[Tensor, tuple[TraceEvent, ...]]],
        worst: list[tuple[Tensor, Look]],
    ) -> TraceEvent:
        output, seen = _compat.values_of(worst[0][0]), worst[0][1]
        if plan.op in LIFTS:
            return data_event(note, output)
        parents = tuple({id(event): event for _, events in bad for event in events}.values())
        values = [(name, before.get(id(tensor), tensor)) for name, tensor in inputs]
        kind: Kind = "heir"
        constants = note.constants
        if plan.is_empty or not inputs:
            kind = "given"
        elif not bad:
            unseen = [source for (_, v), source in zip(values, sources, strict=True) if not look(v).is_finite]
            kind = "given" if unseen or constants else "birth"
            if unseen and isinstance(unseen[0], Note):  # written by an integer view, so no float op saw it
                note = unseen[0]
        else:
            is_new = plan.is_pointwise and new_places(output, [v for _, v in values]) is not None
            nan_before = any(look(before.get(id(t), t)).has_nan for t, _ in bad)
            if is_new:
                kind = "given" if constants else "birth"
            elif seen.has_nan and not nan_before:
                kind = "turned"
        if kind == "given" and constants and seen.has_nan and not any(map(math.isnan, constants)):
            kind = "turned"  # 0 times a constant infinity
        event = TraceEvent(note, kind, seen.has_nan, parents, has_posinf=has_posinf(output, seen))
        event.wrote = next((self._watched[k] for k in map(_compat.storage_key, [output]) if k in self._watched), "")
        if kind in ("birth", "turned"):
            num = sum(e.kind in ("birth", "turned") for e in self.events)
            if num < _MOST_BIRTHS_WITH_EVIDENCE:
                event.evidence = gather(func, plan.is_pointwise, args, kwargs, values, sources, before, output)
            if event.evidence.is_mask and not note.roots & PARAMETER:  # outputs of the model are not a mask
                event.kind = "given"
        return event


def _covers(tensor: Tensor) -> bool:
    """True if a tensor covers its whole storage."""
    return tensor.numel() * tensor.element_size() >= _compat.storage_size(tensor)


def _numbers(tree: Any) -> Iterable[float]:
    return (float(each) for each in leaves(tree) if isinstance(each, (int, float)) and not isinstance(each, bool))
