"""Ray's files are in the run directory, with socket paths that the kernel accepts, and no socket is left."""

import socket
from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.run.directory import RunDirectory
from offbeat.run.ray.attempt import LONGEST, ray_files

SOCKET = "session_2026-11-16_22-14-07_123456_4194304/sockets/plasma_store"


def a_run(place: Path) -> RunDirectory:
    directory = RunDirectory(place)
    directory.create(parse({})).release()
    return directory


@pytest.mark.parametrize("depth", ["short", "a-directory-with-a-long-name/" * 5 + "run"])
def test_sockets_fit_and_are_removed(tmp_path: Path, depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    directory = a_run(tmp_path / depth)
    for _ in range(2):  # the second time finds the files of the first
        with ray_files(directory) as place:
            assert place.resolve() == directory.ray.resolve() and directory.ray.stat().st_mode & 0o777 == 0o700
            (place / SOCKET).parent.mkdir(parents=True)
            (place / "session_2026-11-16_22-14-07_123456_4194304" / "logs").mkdir()
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(place / SOCKET))
        assert not place.is_symlink() and not list(directory.ray.rglob("sockets"))
        assert list(directory.ray.rglob("logs")), "the reason why something failed may be there"


def test_a_link_that_a_killed_process_left_is_replaced_and_one_of_another_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    directory = a_run(tmp_path / ("x" * LONGEST))
    link = tmp_path / f"ob-{directory.name}"
    link.symlink_to(directory.ray.resolve())
    with ray_files(directory) as place:
        assert place == link
    link.symlink_to(tmp_path)
    with ray_files(directory) as place:
        assert place != link and place.resolve() == directory.ray.resolve()
    assert link.is_symlink()
