"""A second copy of a vLLM model's weights, so that a version is loaded while the first copy generates.

On CPU most of a load is packing: 0.5 s for 135M parameters, during which no token was generated. The twin shares the
code and the settings of every layer and owns its tensors. vLLM's layerwise reload fills and packs the twin in a thread
of the worker; then generation pauses only for as long as both exchange their tensors. After that the twin holds the
previous version, whose memory the next load reuses.
"""

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Final

import torch
from torch import Tensor, nn

_OWN: Final = ("_parameters", "_buffers")
_COPIED: Final = (*_OWN, "_modules", "_non_persistent_buffers_set")


class Twin:
    """A model beside `live` that shares everything with it except tensors and what a reload changes.

    >>> live = nn.Linear(2, 1, bias=False)
    >>> twin = Twin(live)
    >>> twin.load(lambda model: nn.init.constant_(model.weight, 7.0))
    >>> twin.join(), live.weight.tolist() == [[7.0, 7.0]]
    (True, False)
    >>> twin.take_over()
    >>> live.weight.tolist()
    [[7.0, 7.0]]
    """

    def __init__(self, live: nn.Module) -> None:
        copies: dict[nn.Module, nn.Module] = {}
        tensors: dict[int, Tensor] = {}
        self.model = _copied(live, copies, tensors)
        self.pairs = list(copies.items())
        self._changed: list[tuple[nn.Module, nn.Module, str]] = []
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def load(self, reload: Callable[[nn.Module], object]) -> None:
        """Begin `reload` of the twin, in a thread."""

        def work() -> None:
            before = [dict(twin.__dict__) for _, twin in self.pairs]
            try:
                with torch.no_grad():
                    reload(self.model)
            except BaseException as error:  # raised again by `join`, in the thread that asks
                self._error = error
            # Besides tensors, a reload leaves functions on the layers that hold packed weights.
            self._changed = [
                (live, twin, name)
                for (live, twin), old in zip(self.pairs, before, strict=True)
                for name, value in twin.__dict__.items()
                if name not in _COPIED and old.get(name) is not value
            ]

        self._thread = Thread(target=work, name="offbeat-load", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the load. Return whether it has ended; raise its error."""
        assert self._thread is not None, "nothing is being loaded"
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def take_over(self) -> None:
        """Let the live model compute with the loaded version. Nothing else may use either model meanwhile."""
        for live, twin in self.pairs:
            for kind in _OWN:
                _exchange(getattr(live, kind), getattr(twin, kind))
        for live, twin, name in self._changed:
            live.__dict__[name] = twin.__dict__[name]


def can_have_twin(model: nn.Module) -> bool:
    """Return whether copies of the tensors would be like the tensors: none is a view of another's memory."""
    tensors = {id(tensor): tensor for tensor in _tensors(model)}.values()
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    return len(set(places)) == len(places)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for kind in _OWN:
            yield from (tensor for tensor in getattr(module, kind).values() if tensor is not None)


def _copied(module: nn.Module, copies: dict[nn.Module, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """Copy a module and its children. What is shared inside the model, as by a tied head, is shared by the copies."""
    if module in copies:
        return copies[module]
    twin = copies[module] = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    for kind in _OWN:
        twin.__dict__[kind] = {
            name: tensor if tensor is None else tensors.setdefault(id(tensor), _copied_tensor(tensor))
            for name, tensor in getattr(module, kind).items()
        }
    twin.__dict__["_modules"] = {
        name: child if child is None else _copied(child, copies, tensors) for name, child in module._modules.items()
    }
    return twin


def _copied_tensor(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    copy.__class__ = tensor.__class__
    copy.__dict__.update(tensor.__dict__)
    return copy


def _exchange(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    """Exchange the values. The dictionaries stay the same objects, which compiled code may refer to."""
    for name in ours:
        ours[name], theirs[name] = theirs[name], ours[name]
