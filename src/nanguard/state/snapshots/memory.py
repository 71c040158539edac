"""How much memory snapshots need, how much is free, and what to do if it is not enough."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard.state.optimizer_traits import traits_of
from nanguard.state.snapshots.packing import nbytes_of

Where = Literal["device", "host", "disk"]


def state_bytes(live: Mapping[str, Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(map(nbytes_of, live.values()))


def expected_state_bytes(optimizers: Iterable[Optimizer], live: Mapping[str, Tensor]) -> int:
    """Bytes of the training state once every optimizer has stepped.

    That is ``live``, the state as it is now, and what optimizers have yet to make: known for torch's own, and for
    others a guess of two tensors for each parameter.
    """
    yet_to_come = sum(
        _tensors_to_come(optimizer, group) * nbytes_of(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and not any(torch.is_tensor(value) for value in optimizer.state.get(p, {}).values())
    )
    return state_bytes(live) + yet_to_come


def free_bytes(where: Where, device: torch.device, folder: str | os.PathLike[str] | None = None) -> int | None:
    """Bytes that are still free; None if that is not known. Does not sync.

    On a GPU that is what the driver has and what torch holds without using it, on the host what can be had without
    swapping, within the limits of the container.
    """
    if where == "disk":
        return shutil.disk_usage(_existing(Path(folder or "."))).free
    if where == "host" or device.type == "cpu":
        limits = [_free_on_host(), *_free_in_cgroups()]
        return min((limit for limit in limits if limit is not None), default=None)
    if device.type != "cuda":
        return None
    driver = torch.cuda.mem_get_info(device)[0]
    return driver + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def ring_that_fits(each: int, *, keep: int, free: int | None, sharers: int = 1, reserved: int = 0) -> int:
    """How many snapshots of ``each`` bytes can be kept within a quarter of what is free: ``keep``, fewer, or 0. Pure.

    One more is always in the making. ``sharers`` are the processes that take their share of the same memory;
    ``reserved`` is what other rings of this process take or will take of that quarter.
    """
    if free is None:
        return keep
    room = free // 4 // max(1, sharers) - reserved
    return max(0, min(keep, room // max(1, each) - 1))


class HostMemory:
    """What the rings of this process have planned to take of the host's memory: one budget for all of them."""

    _planned: ClassVar[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()

    @classmethod
    def reserve(cls, owner: Any, nbytes: int) -> None:
        """As long as ``owner`` exists; 0 gives it back."""
        cls._planned[owner] = nbytes

    @classmethod
    def reserved(cls) -> int:
        return sum(cls._planned.values())


def sharers_of_host(num_ranks: int) -> int:
    """How many of the ranks run on this machine: all of them, unless their launcher says otherwise."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(num_ranks, int(told)) if told.isdigit() and int(told) > 0 else num_ranks


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or the host. Pinning memory fails with a plain ``RuntimeError``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)


def require_fit(
    total: int,
    where: Where,
    device: torch.device,
    *,
    folder: str | os.PathLike[str] | None = None,
    each: int | None = None,
    keep: int | None = None,
) -> None:
    """Raises ``ValueError`` if ``total`` bytes are not free: what is needed, what is free, and what to do."""
    free = free_bytes(where, device, folder)
    if free is None or total <= free:
        return
    sizes = f" ({total // each} of {human(each)})" if each else ""
    there = {"device": f"on {device}", "host": "in host memory", "disk": f"in {folder or '.'}"}[where]
    ways = [f"keep fewer than {keep}"] if keep is not None and keep > 1 else []
    if keep is not None:
        ways += [f"where={other!r}" for other in {"device": ("host", "disk"), "host": ("disk",), "disk": ()}[where]]
    ways += ["or none, with snapshots=None"]
    raise ValueError(f"snapshots need {human(total)}{sizes} and {human(free)} are free {there}: {', '.join(ways)}")


def human(nbytes: int) -> str:
    """Such as "1.2 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.95:  # what is more would round to 1024.0
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _tensors_to_come(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size the optimizer makes for each when it first steps."""
    traits = traits_of(optimizer)
    return traits.num_state_tensors + sum(bool(group.get(option)) for option in traits.state_options)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def _free_on_host(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on macOS or Windows
        return None


def _free_in_cgroups(mine: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What each memory limit on this process leaves; pages of files can be dropped and do not count as used."""
    try:
        lines = [line.split(":", 2) for line in mine.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = base / path.lstrip("/")  # a container may see its own group as the root, or not at all
        groups = [own, *(each for each in own.parents if each == base or base in each.parents)]
        found += [left for group in groups if (left := _left_in(group, *names)) is not None]
    return found


def _left_in(group: Path, limit: str, used: str, droppable: str) -> int | None:
    try:
        most = int((group / limit).read_text())  # "max" if there is none
        left = most - int((group / used).read_text())
    except (OSError, ValueError):
        return None
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left += int(stat.get(droppable, 0))
    except (OSError, ValueError):
        pass
    return max(0, left)
