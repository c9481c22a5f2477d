"""The jail of a sandboxed program: the bwrap command that starts it, and the filter of its system calls.

The seccomp filter lists the calls that Python needs. Every other call returns ENOSYS, as if the kernel did not have it:
mount, ptrace, bpf, keyctl, io_uring, socket, unshare and whatever a later kernel adds. setsid and setpriority are not
there either: with the kernel's autogroups every session has a CPU share, and a program that lowers its own priority
would look starved. A call of another instruction set kills the process. The filter is a classic BPF program of a few
hundred instructions, assembled here, so it needs no library.
"""

import os
import platform
import shutil
import struct
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.errors import SandboxMissing

_LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
"""The last tells the loader of the interpreter where other libraries are."""
_PACKAGES: Final = ("site-packages", "dist-packages")
"""Hidden, because installed packages may contain the tests that a program must pass."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom")
_SHARED: Final = "/dev/shm"
"""Where the locks of multiprocessing, and shared memory, are files: a link to /tmp, so that one limit counts both."""
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
"""Reads the compiled driver from standard input; compiling it here would take a tenth of a run."""
_NEEDED_TO_CHANGE_USER: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")


@dataclass(frozen=True)
class Jail:
    """The parts of the bwrap command that are the same for every run."""

    bwrap: str
    setpriv: str
    """Empty if programs run as the calling user, who is not root and cannot change to another."""
    mounts: tuple[str, ...]
    python: tuple[str, ...]

    def command(self, uid: int, filter_descriptor: int, files_bytes: int) -> list[str]:
        """Return the command of one run: its user, the descriptor to read the filter from, the size of its /tmp."""
        command = [self.bwrap, *_NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
        command += ["--seccomp", str(filter_descriptor)]
        if self.setpriv:
            command += ["--cap-drop", "ALL"]
            command += [word for name in _NEEDED_TO_CHANGE_USER for word in ("--cap-add", name)]
        else:
            command += _UNPRIVILEGED
        command += [*self.mounts, "--perms", "1777", "--size", str(files_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        command += ["--symlink", "/tmp", _SHARED, "--remount-ro", "/", "--"]
        if self.setpriv:
            command += [self.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
            command += ["--inh-caps=-all", "--bounding-set=-all"]
        return [*command, *self.python]


def find_jail(*, root: bool) -> Jail:
    """Set up the jail with the tools and the interpreter of this machine; `SandboxMissing` if that is not possible."""
    if sys.platform != "linux":
        raise SandboxMissing(
            f"bubblewrap needs Linux, but this is {sys.platform}; use a hosted sandbox: 'module:factory'"
        )
    bwrap = _tool("bwrap", "bubblewrap")
    setpriv = _tool("setpriv", "util-linux") if root else ""
    # The interpreter that the virtual environment was made from; it starts without the environment.
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
    """Return the mount options: read-only paths to show, empty folders over those to hide, and a few devices."""
    words: list[str] = []
    links = {path: path.readlink() for path in shown if path.is_symlink()}
    folders = [path for path in dict.fromkeys(shown) if path.exists() and path not in links]
    folders = [path for path in folders if not any(other in path.parents for other in folders)]
    parents = {parent for path in [*folders, *map(Path, _DEVICES)] for parent in path.parents} - {Path("/")}
    for parent in sorted(parents):  # only root could read the ones that bwrap makes by default
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


# name:number on x86_64:number on aarch64, from the kernel's unistd.h; a test compares them with libseccomp's.
_ALLOWED: Final = """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 lseek:8:62 close:3:57
    close_range:436:436 dup:32:23 dup3:292:24 pipe2:293:59 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83
    openat:257:56 openat2:437:437 fstat:5:80 newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44
    faccessat:269:48 faccessat2:439:439 readlinkat:267:78 getdents64:217:61 getcwd:79:17 chdir:80:49
    fchdir:81:50 mkdirat:258:34 unlinkat:263:35 renameat:264:38 renameat2:316:276 linkat:265:37 symlinkat:266:36
    truncate:76:45 ftruncate:77:46 fallocate:285:47 fchmod:91:52 fchmodat:268:53 utimensat:280:88 umask:95:166
    fadvise64:221:223 sendfile:40:71 mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216 madvise:28:233
    brk:12:214 mlock:149:228 munlock:150:229 msync:26:227 membarrier:324:283 ppoll:271:73 pselect6:270:72
    epoll_create1:291:20 epoll_ctl:233:21 epoll_pwait:281:22 eventfd2:290:19 timerfd_create:283:85
    timerfd_settime:286:86 timerfd_gettime:287:87 signalfd4:289:74 sendto:44:206 recvfrom:45:207 sendmsg:46:211
    recvmsg:47:212 shutdown:48:210 getsockopt:55:209 setsockopt:54:208 getsockname:51:204 getpeername:52:205
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
    rt_sigsuspend:130:133 rt_sigqueueinfo:129:138 sigaltstack:131:132 kill:62:129 tkill:200:130 tgkill:234:131
    getitimer:36:102 setitimer:38:103 nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113
    clock_getres:229:114 gettimeofday:96:169 times:100:153 execve:59:221 execveat:322:281 exit:60:93
    exit_group:231:94 wait4:61:260 waitid:247:95 set_tid_address:218:96 set_robust_list:273:99
    get_robust_list:274:100 futex:202:98 rseq:334:293 sched_yield:24:124 sched_getaffinity:204:123
    sched_setaffinity:203:122 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
    sched_get_priority_min:147:126 getpriority:140:141 getcpu:309:168 getpid:39:172
    getppid:110:173 gettid:186:178
    getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150
    getpgid:121:155 setpgid:109:154 getsid:124:156 setuid:105:146 setgid:106:144 setreuid:113:145
    setregid:114:143 setresuid:117:147 setresgid:119:149 setgroups:116:159 capget:125:90 capset:126:91
    getrlimit:97:163 setrlimit:160:164 getrusage:98:165 uname:63:160 getrandom:318:278 restart_syscall:219:128

    dup2:33:- pipe:22:- open:2:- creat:85:- stat:4:- lstat:6:- access:21:- readlink:89:- getdents:78:-
    mkdir:83:- rmdir:84:- unlink:87:- rename:82:- link:86:- symlink:88:- chmod:90:- utime:132:- utimes:235:-
    poll:7:- select:23:- epoll_create:213:- epoll_wait:232:- eventfd:284:- pause:34:- alarm:37:- time:201:-
    fork:57:- vfork:58:- arch_prctl:158:- getpgrp:111:-
"""

# These are allowed with certain arguments only; see `_conditional`.
_CONDITIONAL: Final = """
    clone:56:220 socketpair:53:199 ioctl:16:29 prctl:157:167 prlimit64:302:261
"""

_ARCHITECTURES: Final = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
"""Machine → its AUDIT_ARCH number in a filter, and its column in the tables above."""

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: ld, jeq, jset, ret
_ALLOW, _KILL, _DENY, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS

_NEW_NAMESPACES: Final = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_AF_UNIX: Final = 1
_TERMINAL_QUERIES: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FION…, FIO…CLEX
_HARMLESS_PRCTL: Final = (1, 8, 15, 16, 23, 24, 27, 38, 39, 47)  # names, dropping privileges, …

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def numbers(machine: str, table: str = _ALLOWED + _CONDITIONAL) -> dict[str, int]:
    """Return the system call numbers of a machine by name.

    >>> numbers("aarch64")["execve"]
    221
    """
    column = _ARCHITECTURES[machine][1]
    rows = [entry.split(":") for entry in table.split()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _argument(number: int) -> _Instruction:
    """Load the lower half of an argument; both machines are little-endian, and the arguments checked are ints."""
    return _LOAD, 0, 0, 16 + 8 * number


def _only(argument: int, values: Sequence[int]) -> list[_Instruction]:
    """Allow the call if the argument is one of the values."""
    checks = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [_argument(argument), *checks, (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]


def _conditional() -> dict[str, list[_Instruction]]:
    """Return the instructions that decide each of the conditional calls."""
    allow, deny = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY)
    return {
        "clone": [_argument(0), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), deny, allow],
        "socketpair": _only(0, [_AF_UNIX]),
        "ioctl": _only(1, _TERMINAL_QUERIES),
        "prctl": _only(0, _HARMLESS_PRCTL),
        "prlimit64": _only(0, [0]),  # only its own limits
    }


def assemble(machine: str = "") -> bytes:
    """Assemble the filter for a machine, by default this one, in the format of `bwrap --seccomp`.

    >>> len(assemble("x86_64")) % 8
    0
    >>> assemble("riscv64")
    Traceback (most recent call last):
    ...
    offbeat.errors.SandboxMissing: there is no system call filter for riscv64, only for aarch64 and x86_64; ...
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        known = " and ".join(sorted(_ARCHITECTURES))
        raise SandboxMissing(
            f"there is no system call filter for {machine}, only for {known}; use a hosted sandbox: 'module:factory'"
        )
    program: list[_Instruction] = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, _ARCHITECTURES[machine][0]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the system call
    ]
    verdicts = _conditional()
    for name, number in numbers(machine, _CONDITIONAL).items():
        program += [(_EQUAL, 0, len(verdicts[name]), number), *verdicts[name]]
    for number in sorted(numbers(machine, _ALLOWED).values()):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _NO_SUCH_CALL))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
