"""The publisher's copy of the state it published last, on the host, and how the next state replaces it.

Tensors come one at a time, from whatever device, are worked on by a few threads, and are given on in their order. So
the device never holds a second state, and the host holds this one and the few tensors being worked on.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from torch import Tensor

from offbeat.errors import WeightLogError
from offbeat.storage.store import Writer
from offbeat.weights.delta import Bits, encode
from offbeat.weights.manifest import TensorEntry

State = Iterable[tuple[str, Tensor]]
"""Names and tensors, on any device. A tensor must not change until all have been taken."""
HostCopy = dict[str, Bits]
Entries = dict[str, TensorEntry]
Result = TypeVar("Result")

_AHEAD: Final = 256 << 20
"""Bytes that may wait behind a large tensor, so that other threads go on meanwhile."""


def taken(state: State, pool: ThreadPoolExecutor, threads: int) -> tuple[HostCopy, Entries]:
    """A copy of the state, with the fingerprint of each tensor."""

    def work(_: str, bits: Bits) -> tuple[Bits, str]:
        return bits.copy(), bits.fingerprint()

    copy: HostCopy = {}
    entries: Entries = {}
    for name, (bits, fingerprint) in _in_threads(state, work, pool, threads):
        copy[name] = bits
        entries[name] = TensorEntry(bits.dtype, bits.shape, fingerprint, None)
    return copy, entries


def described(state: State, pool: ThreadPoolExecutor, threads: int) -> Entries:
    """The fingerprint of each tensor; nothing is kept."""

    def work(_: str, bits: Bits) -> TensorEntry:
        return TensorEntry(bits.dtype, bits.shape, bits.fingerprint(), None)

    return dict(_in_threads(state, work, pool, threads))


def advanced(
    copy: HostCopy, state: State, patch: Writer, pool: ThreadPoolExecutor, threads: int
) -> tuple[Entries, int]:
    """Bring the copy up to the state, writing what changed into a patch; returns how many elements that were.

    Where this fails the copy is neither the one nor the other.
    """

    def work(name: str, bits: Bits) -> tuple[Bits, str, bytes, int]:
        base = copy.get(name)
        if base is None or not base.fits(bits):
            blocks, changed = encode(None, bits.words)
            base = bits.copy()
        else:
            blocks, changed = encode(base.words, bits.words, advance=True)
        return base, bits.fingerprint(), blocks, changed

    entries: Entries = {}
    changes = position = 0
    for name, (bits, fingerprint, blocks, changed) in _in_threads(state, work, pool, threads):
        copy[name] = bits
        patch.write(blocks)
        entries[name] = TensorEntry(bits.dtype, bits.shape, fingerprint, (position, position + len(blocks)))
        position += len(blocks)
        changes += changed
    for gone in copy.keys() - entries.keys():
        del copy[gone]
    return entries, changes


def _in_threads(
    state: State, work: Callable[[str, Bits], Result], pool: ThreadPoolExecutor, threads: int
) -> Iterator[tuple[str, Result]]:
    """What the work on each tensor gave, in their order. The state is iterated by the caller's thread alone."""
    at_work: deque[tuple[str, int, Future[Result]]] = deque()
    seen: set[str] = set()
    ahead = 0
    for name, tensor in state:
        if name in seen or "\0" in name or "\n" in name:
            raise WeightLogError(f"{name!r} is no name for a tensor: it comes twice, or breaks a line")
        seen.add(name)
        bits = Bits.of(tensor)
        at_work.append((name, bits.words.nbytes, pool.submit(work, name, bits)))
        ahead += bits.words.nbytes
        while len(at_work) > 2 * threads and ahead > _AHEAD:
            first, nbytes, done = at_work.popleft()
            ahead -= nbytes
            yield first, done.result()
    for name, _, done in at_work:
        yield name, done.result()
