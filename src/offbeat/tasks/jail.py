"""The command line that puts an interpreter behind bubblewrap, and what can be seen from there."""

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.tasks.sandbox import SandboxMissing

_LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
"""The last says where others are, for interpreters that do not know themselves."""
_PACKAGES: Final = ("site-packages", "dist-packages")
"""Hidden: installed packages may hold the very tests a program is judged by."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom")
_NAMESPACES: Final = ("--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try")
_UNPRIVILEGED: Final = ("--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534")
_BOOTSTRAP: Final = """
import marshal, posix
def read(size):
    data = b""
    while len(data) < size:
        data += posix.read(0, size - len(data)) or posix._exit(1)
    return data
exec(marshal.loads(read(int.from_bytes(read(4), "little"))), {"__name__": "__main__"})
"""
"""Takes the driver from standard input, compiled: compiling it would be a tenth of a run."""
_NEEDED_TO_CHANGE_USER: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")


@dataclass(frozen=True)
class Jail:
    """The parts of the command that stay the same from run to run."""

    bwrap: str
    setpriv: str
    """Empty where programs run as the calling user, who cannot change to another."""
    mounts: tuple[str, ...]
    python: tuple[str, ...]

    def command(self, uid: int, filter_descriptor: int, files_bytes: int) -> list[str]:
        """One run: as that user, with the filter read from that descriptor, with so much room in /tmp."""
        command = [self.bwrap, *_NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
        command += ["--seccomp", str(filter_descriptor)]
        if self.setpriv:
            command += ["--cap-drop", "ALL"]
            command += [word for name in _NEEDED_TO_CHANGE_USER for word in ("--cap-add", name)]
        else:
            command += _UNPRIVILEGED
        command += [*self.mounts, "--perms", "1777", "--size", str(files_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        command += ["--remount-ro", "/", "--"]
        if self.setpriv:
            command += [self.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
            command += ["--inh-caps=-all", "--bounding-set=-all"]
        return [*command, *self.python]


def find_jail(*, root: bool) -> Jail:
    """The jail that this machine's tools and this interpreter make up; `SandboxMissing` where there is none."""
    if sys.platform != "linux":
        raise SandboxMissing(f"bubblewrap needs Linux, this is {sys.platform}; use a hosted sandbox, 'module:factory'")
    bwrap = _tool("bwrap", "bubblewrap")
    setpriv = _tool("setpriv", "util-linux") if root else ""
    # The interpreter behind a virtual environment, which it can start without.
    executable = Path(os.path.realpath(Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}")))
    standard_library = Path(os.path.realpath(sysconfig.get_path("stdlib")))
    shown = [*map(Path, _LIBRARIES), standard_library.parent, executable, *([Path(setpriv)] if setpriv else [])]
    hidden = [folder / name for folder in (standard_library, Path("/usr/lib/python3")) for name in _PACKAGES]
    mounts = tuple(_mounts(shown, [folder for folder in hidden if folder.is_dir()]))
    return Jail(bwrap, setpriv, mounts, (str(executable), "-I", "-S", "-B", "-c", _BOOTSTRAP))


def _tool(name: str, package: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        raise SandboxMissing(
            f"{name} is not installed, and model-written code does not run without a sandbox; "
            f"install it with: apt-get install {package}"
        )
    return os.path.realpath(found)


def _mounts(shown: list[Path], hidden: list[Path]) -> list[str]:
    """Read-only views of what is shown, empty folders in place of what is hidden, a few devices."""
    words: list[str] = []
    links = {path: path.readlink() for path in shown if path.is_symlink()}
    folders = [path for path in dict.fromkeys(shown) if path.exists() and path not in links]
    folders = [path for path in folders if not any(other in path.parents for other in folders)]
    parents = {parent for path in [*folders, *map(Path, _DEVICES)] for parent in path.parents} - {Path("/")}
    for parent in sorted(parents):  # those that bwrap makes of itself are root's alone
        words += ["--perms", "0755", "--dir", str(parent)]
    for path in folders:
        words += ["--ro-bind", str(path), str(path)]
    for path, target in links.items():
        words += ["--symlink", str(target), str(path)]
    for path in hidden:
        words += ["--size", "4096", "--tmpfs", str(path), "--remount-ro", str(path)]
    for device in _DEVICES:
        words += ["--dev-bind", device, device]
    return words
