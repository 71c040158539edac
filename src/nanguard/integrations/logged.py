"""What a framework has logged, and the states of torchmetrics: noted before a step, put back if it is skipped."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat

_LOG = ("log", "log_dict")
_SHOWN = ("_progress_bar_metrics", "_callback_metrics", "_logged_metrics")


class NotedMetrics:
    """The states of ``torchmetrics.Metric`` objects inside a module. Does not sync.

    Metrics update tensors and lists in place, or replace them: both are put back, and objects that share a state still
    do so afterwards. A state is copied only if it has changed since it was last noted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._tensors: dict[int, tuple[Tensor, int | None, Tensor]] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []

    def note(self) -> None:
        before, self._tensors = self._tensors, {}
        self._attributes, self._lists = [], []
        for metric in metrics_in(self._model):
            attributes = dict(vars(metric))
            self._attributes.append((metric, attributes))
            for value in attributes.values():
                if isinstance(value, Tensor):
                    self._note_tensor(value, before.get(id(value)))
                elif type(value) is list:
                    self._lists.append((value, list(value)))

    def _note_tensor(self, value: Tensor, known: tuple[Tensor, int | None, Tensor] | None) -> None:
        version = _compat.version(value)
        is_same = known is not None and known[0] is value and version is not None and known[1] == version
        self._tensors[id(value)] = known if known and is_same else (value, version, value.detach().clone())

    def put_back(self) -> None:
        with torch.no_grad():
            for value, version, copy in self._tensors.values():
                if version is None or _compat.version(value) != version:
                    value.copy_(copy)
        for known, items in self._lists:
            known[:] = items
        for metric, attributes in self._attributes:
            vars(metric).clear()
            vars(metric).update(attributes)


class NotedResults:
    """What ``self.log`` of a LightningModule has collected in this epoch, and what the trainer shows of it."""

    def __init__(self, trainer: Any) -> None:
        self._results: MutableMapping[str, Any] = trainer.fit_loop.epoch_loop._results
        self._connector = trainer._logger_connector
        self._values: dict[str, dict[str, Any]] = {}
        self._shown_before: dict[str, dict[str, Any]] = {}

    def note(self) -> None:
        """Their tensors are replaced, never written to, so that it is enough to keep them."""
        self._values = {name: dict(vars(result)) for name, result in self._results.items()}
        self._shown_before = {name: dict(getattr(self._connector, name)) for name in _SHOWN}

    def put_back(self, *, except_for: str) -> None:
        """The skipped step has no value of its own: loggers that ask for one get none."""
        for name, result in list(self._results.items()):
            if result.meta.name == except_for:
                continue
            if name not in self._values:
                del self._results[name]
                continue
            vars(result).clear()
            vars(result).update(self._values[name], _forward_cache=None)
        for name, before in self._shown_before.items():
            shown = getattr(self._connector, name)
            kept = {key: value for key, value in shown.items() if key == except_for}
            shown.clear()
            shown.update(before, **kept)


@contextlib.contextmanager
def muted(trainer: Any, module: Any) -> Iterator[None]:
    """Inside, ``training_step`` of a LightningModule logs nothing, and metrics are put back afterwards."""
    metrics = NotedMetrics(module)
    metrics.note()
    loggers, silent = trainer.loggers, _silent_logger(type(trainer))
    own = {name: vars(module)[name] for name in _LOG if name in vars(module)}
    trainer.loggers = [silent for _ in loggers]
    for name in _LOG:
        object.__setattr__(module, name, _log_nothing)
    try:
        yield
    finally:
        trainer.loggers = loggers
        for name in _LOG:
            object.__delattr__(module, name)
        vars(module).update(own)
        metrics.put_back()


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of ``LightningModule.log``."""


def _silent_logger(trainer: type) -> Any:
    """Of the package that the trainer is from."""
    package = trainer.__module__.partition(".trainer")[0]
    return importlib.import_module(f"{package}.loggers.logger").DummyLogger()


def metrics_in(model: nn.Module) -> list[nn.Module]:
    """The torchmetrics that are attributes of a module, at any depth; none if the package is not in use."""
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    return [] if metric is None else [module for module in model.modules() if isinstance(module, metric)]
