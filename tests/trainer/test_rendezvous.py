"""Ranks meet on one address, nothing listens elsewhere, and a rank that does not come is named."""

import multiprocessing
import os
import pickle
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from offbeat.errors import RankSilent
from offbeat.trainer.fsdp import join, leave, open_listener

LISTENING = "0A"


def listening_addresses() -> set[str]:
    """The addresses on which this process listens, from the kernel's table of TCP sockets."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                found.add(_address(fields[1].split(":")[0]))
    return found


def _address(digits: str) -> str:
    if len(digits) == 8:
        return socket.inet_ntop(socket.AF_INET, bytes.fromhex(digits)[::-1])
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, 32, 8)]
    return socket.inet_ntop(socket.AF_INET6, b"".join(words))


def other_rank(rendezvous: str, pipe: Connection) -> None:
    ranks = join(1, 2, rendezvous)
    pipe.send((float(ranks.sum(torch.ones(1))), sorted(listening_addresses())))
    leave()


@pytest.mark.engine
def test_ranks_that_meet_on_loopback_listen_nowhere_else() -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    listener = open_listener("127.0.0.1")
    process = context.Process(target=other_rank, args=(listener.rendezvous, sender))
    process.start()
    ranks = join(0, 2, listener.rendezvous, listener=listener)
    assert float(ranks.sum(torch.ones(1))) == 2
    mine, (theirs, addresses) = listening_addresses(), receiver.recv()
    assert theirs == 2 and mine == {"127.0.0.1"} and set(addresses) <= {"127.0.0.1"}
    leave()
    process.join(20)


def test_the_table_of_sockets_shows_one_that_listens_everywhere() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in listening_addresses()


def test_ranks_that_do_not_arrive_are_named() -> None:
    listener = open_listener("127.0.0.1")
    with pytest.raises(
        RankSilent, match=r"rank 1 did not arrive at tcp://127\.0\.0\.1:\d+ within 1 s \(nor did rank 2\)"
    ):
        join(0, 3, listener.rendezvous, listener=listener, patience=timedelta(seconds=1))


def test_a_rank_that_finds_no_rank_0_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RankSilent, match=r"rank 0 did not answer at tcp://127\.0\.0\.1") as lost:
        join(1, 2, f"tcp://127.0.0.1:{port}", patience=timedelta(seconds=1))
    assert lost.value.rank == 0


def test_a_lost_rank_survives_the_way_to_another_process() -> None:
    again = pickle.loads(pickle.dumps(RankSilent(3, "did not arrive")))
    assert isinstance(again, RankSilent) and again.rank == 3 and str(again) == "rank 3 did not arrive"
