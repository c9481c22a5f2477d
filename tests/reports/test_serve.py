"""`offbeat report --live`: who is answered, what is updated, how it ends."""

import http.client
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.reports.serve import ReportServer, ReportSource
from offbeat.run.journal import FileJournal
from tests.fixtures.processes import INTERRUPTIBLE
from tests.reports.made_run import make_run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_run(tmp_path / "one", ended=None).path


@pytest.fixture
def server(place: Path) -> Iterator[ReportServer]:
    with ReportServer(ReportSource([place])) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers.get("ETag", "")


def test_the_page_needs_the_token_and_the_name_of_this_machine(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1" and len(server.token) > 20
    status, page, _ = ask(server, f"/{server.token}/")
    assert status == 200 and "connect-src" in page and 'data-live="part"' in page
    for path in (
        "/",
        "/part",
        f"/{server.token}x/",
        f"/{server.token}/config.json",
        f"/{server.token}/../events.jsonl",
    ):
        assert ask(server, path)[:2] == (404, "not found"), path
    assert ask(server, f"/{server.token}/", Host="evil.example")[0] == 404


def test_the_content_changes_when_the_run_writes_an_event(server: ReportServer, place: Path) -> None:
    status, before, state = ask(server, f"/{server.token}/part")
    assert status == 200 and "at step 8 of 8" in before and "<html" not in before
    assert ask(server, f"/{server.token}/part", **{"If-None-Match": state})[0] == 304
    with FileJournal(place / "events.jsonl") as journal:
        journal.write(EventKind.STEP, 9, metrics={"reward_mean": 0.5}, lags=[0], groups=1)
    status, after, _ = ask(server, f"/{server.token}/part", **{"If-None-Match": state})
    assert status == 200 and "at step 9 of 9" in after


def test_a_run_that_is_gone_is_an_answer_and_not_a_crash(server: ReportServer, place: Path) -> None:
    place.rename(place.parent / "moved")
    status, text, _ = ask(server, f"/{server.token}/part")
    assert status == 500 and "holds no run" in text


def test_a_port_in_use_is_an_error_with_advice(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match="give another --port, or none"):
            ReportServer(ReportSource([place]), taken.getsockname()[1])


def test_ctrl_c_ends_it_with_a_sentence(place: Path) -> None:
    command = [*INTERRUPTIBLE, "report", str(place), "--live"]
    one = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what it does until its first line
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert one.stdout is not None
    first = one.stdout.readline()
    one.send_signal(signal.SIGINT)
    try:
        output, _ = one.communicate(timeout=60)
    finally:
        one.kill()
    assert first.startswith("live report: http://127.0.0.1:")
    assert one.returncode == 0 and f"The live report has ended. To keep a copy: offbeat report {place}" in output


def test_the_page_has_the_policy_of_its_script_and_head_has_no_body(server: ReportServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    for method in ("GET", "HEAD"):
        connection.request(method, f"/{server.token}/")
        answer = connection.getresponse()
        body = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
        assert "frame-ancestors 'none'" in policy and "'unsafe-inline'; script" in policy
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8" and bool(body) == (method == "GET")
        connection.close()


def test_a_client_that_goes_away_prints_nothing(server: ReportServer, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        client = socket.create_connection(("127.0.0.1", server.server_port))
        client.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # resets the connection
    assert ask(server, f"/{server.token}/", Host=f"127.0.0.1:{server.server_port}")[0] == 200
    assert "Traceback" not in capfd.readouterr().err
