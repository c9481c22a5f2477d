"""The requests for prompts that wait, in the order in which they came, by the version that their worker serves.

Whether a request can be granted depends only on its version, of which there are few. So the next request to grant is
found among thousands by a look at the first one of each version.
"""

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from offbeat.rollout.prompt_leases import PromptLease


@dataclass(eq=False)
class WaitingRequest:
    """A request of a worker for prompts."""

    count: int
    by: str
    version: int | None
    """The version that the worker serves; None while it has passed no probe."""
    arrival: int
    granted: asyncio.Future[list[PromptLease]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WaitingLine:
    """Requests by arrival and version.

    >>> async def example():
    ...     line = WaitingLine()
    ...     early, late, unproven = line.join(1, "a", version=7), line.join(1, "b", version=6), line.join(1, "c", None)
    ...     first, of_version_6 = line.first({6, 7}) is early, line.first({6}) is late
    ...     line.move("a", None)                            # its worker loads other weights
    ...     return first, of_version_6, line.versions
    >>> asyncio.run(example())
    (True, True, {6})
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._by_worker: dict[str, dict[int, WaitingRequest]] = {}
        # Heaps by arrival. A request that has left or moved to another version is skipped when it comes first.
        self._by_version: dict[int, list[tuple[int, WaitingRequest]]] = {}

    def join(self, count: int, by: str, version: int | None) -> WaitingRequest:
        """Add a request at the end."""
        request = WaitingRequest(count, by, version, next(self._arrivals))
        self._by_worker.setdefault(by, {})[request.arrival] = request
        self._push(request)
        return request

    def leave(self, request: WaitingRequest) -> None:
        """Remove a request, if it still waits."""
        requests = self._by_worker.get(request.by, {})
        requests.pop(request.arrival, None)
        if not requests:
            self._by_worker.pop(request.by, None)

    def move(self, by: str, version: int | None) -> None:
        """Note that a worker serves this version from now on. Its requests keep their places."""
        for request in self._by_worker.get(by, {}).values():
            if request.version != version:
                request.version = version
                self._push(request)

    @property
    def versions(self) -> set[int]:
        """The versions with a request that waits."""
        for version in list(self._by_version):
            self._skip(version)
        return set(self._by_version)

    def first(self, versions: Iterable[int]) -> WaitingRequest:
        """Return the request of these versions that came first; each must have one, as `versions` says."""
        return min(self._by_version[version][0] for version in versions)[1]

    def _push(self, request: WaitingRequest) -> None:
        if request.version is not None:
            heappush(self._by_version.setdefault(request.version, []), (request.arrival, request))

    def _skip(self, version: int) -> None:
        heap = self._by_version[version]
        while heap and not self._waits(heap[0][1], version):
            heappop(heap)
        if not heap:
            del self._by_version[version]

    def _waits(self, request: WaitingRequest, version: int) -> bool:
        return request.version == version and request.arrival in self._by_worker.get(request.by, {})
