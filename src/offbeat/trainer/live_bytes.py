"""How many bytes tensors take while some code runs, on any device: what allocators tell on a GPU, counted."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation makes, for as long as it lives.

    >>> with LiveBytes() as live:
    ...     a = torch.zeros(1000)
    ...     b = a + 1
    ...     del a
    >>> live.now, live.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _plain(tensor) and tensor.untyped_storage()._cdata not in given:
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._watched:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _plain(value: object) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter)
