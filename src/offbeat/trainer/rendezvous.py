"""How the ranks of a trainer meet: a TCP store that listens on one address, chosen by rank 0.

    listener = open_listener("127.0.0.1")                    # rank 0; 127.0.0.1 if all ranks are on one machine
    ranks = join(0, size, listener.rendezvous, listener=listener)
    ranks = join(3, size, "tcp://127.0.0.1:41873")           # the others, told by whoever started them
    leave()

torch's own `tcp://` rendezvous listens on every interface. Here the socket is bound first and given to the store.
"""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from offbeat.errors import RankSilent
from offbeat.trainer.fsdp import Ranks, by_node

LOOPBACK: Final = "127.0.0.1"
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=10)
"""How long a rank waits for the others in one collective. Another rank may be writing a checkpoint or publishing."""
JOIN_TIMEOUT: Final = timedelta(minutes=3)
"""How long a rank waits for all others to arrive."""
_ADDRESS_OF_INTERFACE: Final = 0x8915
"""SIOCGIFADDR of Linux."""


@dataclass(frozen=True)
class Listener:
    """A socket that listens on one address, before the store takes it over."""

    rendezvous: str
    """What the other ranks need: `tcp://address:port`."""
    socket: socket.socket


def open_listener(address: str) -> Listener:
    """Listen on a free port of `address` and of no other interface."""
    listening = socket.create_server((address, 0), backlog=512)
    return Listener(f"tcp://{address}:{listening.getsockname()[1]}", listening)


def join(
    rank: int,
    size: int,
    rendezvous: str,
    *,
    listener: Listener | None = None,
    device: str = "cpu",
    places: Sequence[str] = (),
    patience: timedelta = JOIN_TIMEOUT,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> Ranks:
    """Join the process group as rank `rank` of `size`; return when all ranks have joined.

    With a loopback address or a file, all ranks are on one machine and use only the loopback interface. Otherwise they
    use the interface of this machine's address, or what the environment names (`GLOO_SOCKET_IFNAME`,
    `NCCL_SOCKET_IFNAME`). On CUDA, the rank uses the device of its place among the ranks of its node.

    Args:
        rank: The number of this rank.
        size: The number of all ranks.
        rendezvous: `tcp://address:port` of rank 0's listener, or `file:///…` for ranks on one machine.
        listener: On rank 0, the listener that the address belongs to.
        device: `cpu` or `cuda`.
        places: The node of each rank, in order. Default: all on one node.
        patience: How long to wait for the others. Raises `RankSilent` with the ranks that did not arrive.
        timeout: The limit of each collective afterwards.

    >>> listener = open_listener("127.0.0.1")
    >>> ranks = join(0, 1, listener.rendezvous, listener=listener)
    >>> leave()
    >>> ranks.rank, ranks.size
    (0, 1)
    """
    places = places or ["here"] * size
    if device == "cuda":
        local = [one for one, place in enumerate(places) if place == places[rank]].index(rank)
        torch.cuda.set_device(local % torch.cuda.device_count())  # Ray shows each actor its own devices only
    _choose_interface(rendezvous)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if rendezvous.startswith("file://"):
        distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size, timeout=timeout)
    else:
        store = _meet(rank, size, rendezvous, listener, patience)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, distributed.group.WORLD, by_node(places))


def leave() -> None:
    """Leave the process group."""
    distributed.destroy_process_group()


def _meet(rank: int, size: int, rendezvous: str, listener: Listener | None, patience: timedelta) -> TCPStore:
    """Connect to the store of rank 0, and wait there for all ranks."""
    deadline = time.monotonic() + patience.total_seconds()
    address, port = rendezvous.removeprefix("tcp://").rsplit(":", 1)
    descriptor = None if listener is None else listener.socket.detach()  # the store closes it
    try:
        store = TCPStore(
            address, int(port), is_master=rank == 0, timeout=patience, wait_for_workers=False,
            master_listen_fd=descriptor,
        )  # fmt: skip
    except distributed.DistError as error:
        how = f"did not answer at {rendezvous} within {patience.total_seconds():.0f} s: {_first_line(error)}"
        raise RankSilent(0, how) from error
    store.set(f"arrived/{rank}", "yes")
    for other in range(size):
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([f"arrived/{other}"], left)
        except distributed.DistError:
            missing = [one for one in range(size) if not store.check([f"arrived/{one}"])] or [other]
            also = f" (nor did {', '.join(f'rank {one}' for one in missing[1:])})" if missing[1:] else ""
            how = f"did not arrive at {rendezvous} within {patience.total_seconds():.0f} s{also}"
            raise RankSilent(missing[0], how) from None
    return store


def _choose_interface(rendezvous: str) -> None:
    """Make gloo and NCCL use loopback, or the interface by which this machine reaches rank 0."""
    address = rendezvous.removeprefix("tcp://").rsplit(":", 1)[0]
    loopback = rendezvous.startswith("file://") or address.startswith("127.")
    own = LOOPBACK if loopback else _own_address(address)
    interface = next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is not None and (loopback or variable not in os.environ):
            os.environ[variable] = interface


def _own_address(address: str) -> str:
    """Return the address of this machine from which packets to `address` leave; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # the interface has no IPv4 address
            return None
    return socket.inet_ntoa(found[20:24])


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
