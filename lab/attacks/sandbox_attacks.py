# ruff: noqa: E501  (one attack per line)
"""Programs that try to escape from the sandbox or to harm the machine around it.

The attacker knows the machine: placeholders such as `@SECRET_FILE@` and `@PORT@` are replaced by what
`sandbox_witness.py` has set up. A program that gets what it must not get calls `claim(...)`; everything else is checked
from outside. Attacks marked `harmless` do no damage without a sandbox either. Run without one, they must be detected;
otherwise the witness misses them.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

PRELUDE = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBER = dict(entry.split(":")[::2] if os.uname().machine == "aarch64" else entry.split(":")[:2] for entry in '''
    ptrace:101:117 process_vm_readv:310:270 pidfd_open:434:434 pidfd_getfd:438:438 mount:165:40 umount2:166:39
    pivot_root:155:41 chroot:161:51 unshare:272:97 setns:308:268 clone:56:220 clone3:435:435 keyctl:250:219
    add_key:248:217 bpf:321:280 perf_event_open:298:241 io_uring_setup:425:425 userfaultfd:323:282 personality:135:92
    init_module:175:105 reboot:169:142 sethostname:170:161 clock_settime:227:112 swapon:167:224 acct:163:89
    open_by_handle_at:304:265 syslog:103:116 mknodat:259:33 inotify_init1:294:26 fanotify_init:300:262 shmget:29:194
    memfd_create:319:279 socket:41:198 capset:126:91 setuid:105:146 setresuid:117:147 setgroups:116:159 prctl:157:167
    fsopen:430:430 open_tree:428:428 move_mount:429:429 kcmp:312:272 quotactl:179:60 seccomp:317:277
    prlimit64:302:261 process_madvise:440:440 landlock_create_ruleset:444:444 mq_open:240:180 vhangup:153:58
'''.split())
def call(name, *arguments):
    ctypes.set_errno(0)
    wide = [a if isinstance(a, (bytes, ctypes.Array, ctypes.Structure)) or a is None else ctypes.c_long(a) for a in arguments]
    return libc.syscall(ctypes.c_long(int(NUMBER[name])), *wide)
def claim(*what):
    os.write(1, ("ESCAPED " + " ".join(map(str, what)) + "\\n").encode())
def attempt(action, *arguments):
    try:
        return action(*arguments)
    except BaseException as error:
        return None
def show(path):
    text = attempt(lambda: open(path, "rb").read(4096))
    if text is not None:
        os.write(1, text + b"\\n")
    return text
"""


@dataclass(frozen=True)
class Attack:
    """A program and how to run it."""

    name: str
    program: str
    harmless: bool = False
    """True if it may run without a sandbox, to prove that the witness detects it."""
    twice: bool = False
    """True if a second run would use what the first one left."""

    def text(self, facts: Mapping[str, object]) -> str:
        """Return the program with the placeholders filled in."""
        program = PRELUDE + textwrap.dedent(self.program)
        for name, value in facts.items():
            program = program.replace(f"@{name}@", str(value))
        return program


# One system call each: a call that does not fail is a claim. The arguments would work for a process with the permission.
SYSTEM_CALLS = {
    "ptrace the parent": ("ptrace", "16, @PARENT@, 0, 0"),
    "ptrace a neighbor of the same user": ("ptrace", "16, @NEIGHBOR@, 0, 0"),
    "read the parent's memory": ("process_vm_readv", "@PARENT@, bytes(16), 1, bytes(16), 1, 0"),
    "open a pidfd of the parent": ("pidfd_open", "@PARENT@, 0"),
    "mount a tmpfs": ("mount", "b'none', b'/tmp', b'tmpfs', 0, None"),
    "mount the host's proc": ("mount", "b'proc', b'/tmp', b'proc', 0, None"),
    "remount the root writable": ("mount", "None, b'/', None, 0x20 | 0x1000, None"),
    "unmount the libraries": ("umount2", "b'/usr/lib', 2"),
    "unmount what hides packages": ("umount2", "b'@SITE_PACKAGES@', 2"),
    "new mount interface": ("fsopen", "b'tmpfs', 0"),
    "open_tree": ("open_tree", "-100, b'/', 1"),
    "pivot_root": ("pivot_root", "b'/tmp', b'/tmp'"),
    "chroot": ("chroot", "b'/tmp'"),
    "new user namespace": ("unshare", "0x10000000"),
    "new mount namespace": ("unshare", "0x00020000"),
    "clone into a user namespace": ("clone", "0x10000000 | 17, 0, 0, 0, 0"),
    "clone3": ("clone3", "(ctypes.c_uint64 * 11)(0x10000000), 88"),
    "join a namespace": ("setns", "0, 0"),
    "read a session keyring": ("keyctl", "0, -3, 1"),
    "add a key": ("add_key", "b'user', b'offbeat', b'x', 1, -3"),
    "bpf": ("bpf", "0, bytes(128), 128"),
    "perf_event_open": ("perf_event_open", "bytes([0, 0, 0, 0, 112]) + bytes(107), 0, -1, -1, 0"),
    "io_uring": ("io_uring_setup", "4, ctypes.create_string_buffer(256)"),
    "userfaultfd": ("userfaultfd", "0"),
    "personality without address randomization": ("personality", "0x0040000"),
    "load a kernel module": ("init_module", "bytes(64), 64, b''"),
    "reboot": ("reboot", "0xfee1dead, 672274793, 0, 0"),
    "rename the host": ("sethostname", "b'owned', 5"),
    "set the clock": ("clock_settime", "0, (ctypes.c_long * 2)(0, 0)"),
    "swap on a file": ("swapon", "b'/tmp/x', 0"),
    "process accounting": ("acct", "b'/tmp/x'"),
    "open a file by its handle": ("open_by_handle_at", "3, bytes(128), 0"),
    "read the kernel's log": ("syslog", "3, ctypes.create_string_buffer(4096), 4096"),
    "make a device": ("mknodat", "-100, b'/tmp/disk', 0o60666, 254 << 8"),
    "watch the host by inotify": ("inotify_init1", "0"),
    "fanotify": ("fanotify_init", "0, 0"),
    "shared memory of System V": ("shmget", "42, 1 << 20, 0o1666"),
    "memory without a name": ("memfd_create", "b'x', 0"),
    "message queue": ("mq_open", "b'/offbeat', 0o102, 0o666, None"),
    "all capabilities": ("capset", "(ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)"),
    "become root": ("setuid", "0"),
    "become the user of another slot": ("setresuid", "os.getuid() + 1, os.getuid() + 1, os.getuid() + 1"),
    "join the group of root": ("setgroups", "1, (ctypes.c_uint32 * 1)(0)"),
    "allow any process to trace it": ("prctl", "0x59616d61, -1, 0, 0, 0"),
    "raise the parent's limits": ("prlimit64", "@PARENT@, 7, (ctypes.c_uint64 * 2)(9, 9), None"),
    "a filter of its own that asks a tracer": ("seccomp", "1, 8, bytes(16)"),
    "hang up the terminal": ("vhangup", ""),
}

SECRETS = {
    "environment": "os.write(1, repr(dict(os.environ)).encode())",
    "environment of the parent in /proc": "[show(f'/proc/{pid}/environ') for pid in ('self', 1, os.getppid(), @PARENT@)]",
    "environment of every process in /proc": "[show(f'/proc/{pid}/environ') for pid in range(1, 70000)]",
    "a secret file by its path": "show('@SECRET_FILE@') and claim('secret')",
    "a secret file through a symlink": "os.symlink('@SECRET_FILE@', '/tmp/link-@TOKEN@'); show('/tmp/link-@TOKEN@') and claim('link')",
    "a secret file through a hard link": "attempt(os.link, '@SECRET_FILE@', '/tmp/hard'); show('/tmp/hard')",
    "a secret file by climbing up": "show('../' * 40 + '@SECRET_FILE@') and claim('climbed')",
    "the disk itself": "[show(f'/dev/{name}') and claim(name) for name in ('vda', 'sda', 'nvme0n1', 'mem', 'kmsg', 'port')]",
    "password hashes": "show('/etc/shadow') and claim('shadow')",
    "this repository": "show('@REPOSITORY@/pyproject.toml') and claim('repository')",
    "installed packages": "attempt(os.listdir, '@SITE_PACKAGES@') and claim('packages')",
    "home folders": "[set(attempt(os.listdir, path) or []) - {'ld.so.cache'} and claim(path) for path in ('/home', '/work', '/var', '/etc', '/proc', '/sys', '/run', '/mnt')]",
    "descriptors left open": """
        for number in range(3, 1024):
            if attempt(os.fstat, number):
                claim('descriptor', number, attempt(os.listdir, number))""",
    "a folder reached through a descriptor": """
        for number in range(0, 1024):
            found = attempt(lambda: os.open('@SECRET_FILE@'[1:], os.O_RDONLY, dir_fd=number))
            if found: claim('reached', os.read(found, 100))""",
    "notes for the next run": """
        places = ['/tmp', '/dev', '/dev/shm', '/', '/var/tmp', '/usr/lib', '/run', os.path.dirname(os.__file__)]
        for place in places:
            if os.path.exists(place + '/note-@TOKEN@'): claim('note in', place)
            attempt(lambda: open(place + '/note-@TOKEN@', 'w').write('x'))""",
}

NETWORK = {
    "TCP to the host": "s = socket.create_connection(('127.0.0.1', @PORT@), 2); s.send(b'@TOKEN@'); claim('tcp')",
    "UDP to the host": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'@TOKEN@', ('127.0.0.1', @PORT@)); claim('udp')",
    "abstract socket of the host": "s = socket.socket(socket.AF_UNIX); s.connect('\\0@ABSTRACT@'); s.send(b'@TOKEN@'); claim('abstract')",
    "socket in a folder of the host": "s = socket.socket(socket.AF_UNIX); s.connect('@UNIX_SOCKET@'); s.send(b'@TOKEN@'); claim('unix')",
    "netlink": "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0)); claim('netlink')",
    "raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); claim('raw')",
    "packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); claim('packet')",
    "socket to the hypervisor": "socket.socket(socket.AF_VSOCK); claim('vsock')",
    "kernel crypto socket": "socket.socket(38, socket.SOCK_SEQPACKET); claim('alg')",
    "names": "socket.getaddrinfo('example.org', 80) and claim('resolved')",
    "a server": "s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); claim('listens')",
    "a pair of network sockets": "socket.socketpair(socket.AF_INET) and claim('pair')",
    "any family of sockets": "[claim('family', n) for n in range(64) for kind in (1, 2, 3) if call('socket', n, kind, 0) >= 0]",
}

PROCESSES = {
    "kill every process": "attempt(os.kill, -1, signal.SIGKILL)",
    "kill the parent": "[attempt(os.kill, pid, s) for pid in (@PARENT@, os.getppid()) if pid > 1 for s in (signal.SIGUSR1, 9)]",
    "signal the parent": "os.kill(@PARENT@, signal.SIGUSR1)",
    "kill a neighbor of the same user": "os.kill(@NEIGHBOR@, signal.SIGKILL)",
    "stop every process": "[attempt(os.kill, pid, signal.SIGSTOP) for pid in range(2, 70000)]",
    "kill its process group": "attempt(os.killpg, 0, signal.SIGKILL); attempt(os.killpg, os.getpgid(0), signal.SIGKILL)",
    "slow down neighbors": "attempt(os.setpriority, os.PRIO_PROCESS, @NEIGHBOR@, 19) or claim(attempt(os.getpriority, os.PRIO_PROCESS, @NEIGHBOR@)) if attempt(os.getpriority, os.PRIO_PROCESS, @NEIGHBOR@) is not None else None",
    "a daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                [attempt(os.close, n) for n in range(1024)]
                time.sleep(600)
            os._exit(0)
        os.wait()""",
    "many daemons that ignore signals": """
        [signal.signal(s, signal.SIG_IGN) for s in range(1, 32) if s not in (9, 19)]
        for _ in range(20):
            if os.fork() == 0:
                os.setsid(); time.sleep(600)""",
    "answer, then hang": "print('done', flush=True); [attempt(os.close, n) for n in range(3)]; time.sleep(600)",
    "fork bomb": "while True: attempt(os.fork)",
    "threads without end": """
        import threading
        while True: attempt(lambda: threading.Thread(target=time.sleep, args=(600,), daemon=True).start())""",
    "start itself over and over": """
        import subprocess
        code = 'import subprocess, sys\\nwhile True: subprocess.Popen([sys.executable, "-I", "-S", "-c", sys.argv[1], sys.argv[1]])'
        subprocess.Popen([sys.executable, '-I', '-S', '-c', code, code]); time.sleep(600)""",
    "zombies": "while True: attempt(os.fork) == 0 and os._exit(0)",
}

RESOURCES = {
    "memory": """
        x = []
        while True:
            x.append(bytearray(1 << 20))
            if len(x) > @MEMORY_MB@: claim(len(x), 'MiB'); break""",
    "memory spread over children": """
        alive, (read, write) = set(), os.pipe()
        os.set_blocking(read, False)
        while len(alive) * 20 <= @MEMORY_MB@:
            if attempt(os.fork) == 0:
                x = [os.urandom(1 << 20) for _ in range(20)]; os.write(write, os.getpid().to_bytes(4, 'big')); time.sleep(600)
            report = attempt(os.read, read, 4)
            if report: alive.add(int.from_bytes(report, 'big'))
            while True:
                dead = (attempt(os.waitpid, -1, os.WNOHANG) or (0,))[0]
                if not dead: break
                alive.discard(dead)
        claim(len(alive), 'children of 20 MiB')""",
    "more children than allowed": """
        alive = 0
        while alive <= @PROCESSES@:
            child = attempt(os.fork)
            if child == 0: time.sleep(600)
            if child is None: break
            alive += 1
        else: claim(alive, 'children')""",
    "memory in pipes": """
        x = []
        while True:
            pair = attempt(os.pipe)
            if pair: os.set_blocking(pair[1], False); x.append(pair); attempt(os.write, pair[1], bytes(1 << 16))
            else: time.sleep(0.01)""",
    "locked memory": "x = bytearray(1 << 29); libc.mlock(ctypes.byref((ctypes.c_char * (1 << 29)).from_buffer(x)), 1 << 29)",
    "fill /tmp": """
        f = open('/tmp/full', 'wb', buffering=0)
        while attempt(lambda: f.write(bytes(1 << 20))): pass
        if f.tell() > @FILES_MB@ << 20: claim(f.tell() >> 20, 'MiB of files')""",
    "many small files": "n = 0\nwhile True: attempt(lambda: open(f'/tmp/{n}', 'x').close()); n += 1",
    "a huge sparse file": "attempt(lambda: open('/tmp/huge', 'wb').truncate(1 << 50)); f = open('/tmp/huge', 'ab'); attempt(f.write, bytes(64 << 20))",
    "flood of output": "while True: os.write(1, b'x' * 65536)",
    "flood of errors": "while True: os.write(2, b'x' * 65536)",
    "flood of both from children": "[os.fork() for _ in range(3)]\nwhile True: os.write(1 + os.getpid() % 2, b'x' * 65536)",
    "sleep": "time.sleep(600)",
    "sleep, deaf to signals": "[attempt(signal.signal, s, signal.SIG_IGN) for s in range(1, 65)]\nwhile True: attempt(time.sleep, 600)",
    "burn in many processes": "[os.fork() for _ in range(5)]\nwhile True: pass",
    "a power that never ends": "x = 9 ** 9 ** 9",
    "deep recursion": "sys.setrecursionlimit(1 << 30)\ndef f(): return [f() for _ in 'x']\nf()",
    "deep recursion in C": "x = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)",
    "a bomb for the compiler": "eval('(' * 10 ** 6 + ')' * 10 ** 6)",
    "descriptors without end": "x = []\nwhile True: x.append(attempt(os.dup, 1))",
    "its own limits lifted": """
        import resource
        for n in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS):
            soft, hard = resource.getrlimit(n)
            if hard != -1 and attempt(lambda: resource.setrlimit(n, (hard + 1, hard + 1)) or True): claim('limit', n)""",
    "a time bomb": "signal.signal(signal.SIGALRM, lambda *_: attempt(lambda: open('@OPEN_FOLDER@/bomb', 'w')))\nsignal.alarm(1)\ntime.sleep(3)",
}

HOST = {
    "write into a folder open to all": "open('@OPEN_FOLDER@/left', 'w').write('x')",
    "overwrite the tests": "open('@TESTS_FILE@', 'w').write('[]')",
    "overwrite the tests through a symlink": "os.symlink('@TESTS_FILE@', '/tmp/t'); open('/tmp/t', 'w').write('[]')",
    "write outside /tmp": "[attempt(lambda: open(p + '/left-@TOKEN@', 'w')) and claim(p) for p in ('/', '/usr', '/usr/lib', '/dev', '/root', '/var/tmp', '/dev/shm', '@SITE_PACKAGES@')]",
    "overwrite the interpreter": "[attempt(lambda: open(p, 'r+b')) and claim(p) for p in (sys.executable, os.__file__)]",
    "a program that changes its user": "open('/tmp/su', 'wb').write(open(sys.executable, 'rb').read()); os.chmod('/tmp/su', 0o6755); os.system('/tmp/su'); claim(os.geteuid()) if os.geteuid() == 0 else None",
    "open permissions on the device": "attempt(lambda: os.chmod('/dev/null', 0) or claim('chmod'))",
    "type into the terminal": "import fcntl; [attempt(lambda: fcntl.ioctl(n, 0x5412, b'x') or True) and claim('typed') for n in range(3)]; show('/dev/tty')",
    "leave a core dump": "os.chdir('/tmp'); os.fork() or os.abort(); os.wait(); [claim(f) for f in os.listdir('/tmp') if 'core' in f]; ctypes.string_at(0)",
    "kill process 1": "[attempt(os.kill, 1, s) for s in range(1, 65)]; call('ptrace', 16, 1, 0, 0) != -1 and claim('traced')",
    "have the kernel kill it": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "calls of the 32-bit interface": """
        import mmap
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80
        run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        if os.uname().machine == 'x86_64': claim('answered', run())""",
    "a system call of the other numbering": "if libc.syscall(ctypes.c_long(0x40000000 | 39)) != -1: claim('x32')",
    "exit with the status of a kill": "os._exit(137)",
    "forbid that it dies with its parent": "call('prctl', 1, 0, 0, 0, 0); os.setsid() if os.fork() == 0 else None; time.sleep(600)",
}

HARMLESS = {
    "environment", "environment of the parent in /proc", "a secret file by its path", "a secret file through a symlink",
    "password hashes", "this repository", "installed packages", "TCP to the host", "UDP to the host",
    "abstract socket of the host", "socket in a folder of the host", "netlink", "signal the parent",
    "kill a neighbor of the same user", "a daemon", "sleep", "a time bomb", "write into a folder open to all",
    "overwrite the tests", "watch the host by inotify", "memory without a name",
}  # fmt: skip


def _attacks() -> list[Attack]:
    programs = {
        name: f"if call('{function}', {arguments}) != -1: claim('{function}')"
        for name, (function, arguments) in SYSTEM_CALLS.items()
    }
    for kind in (SECRETS, NETWORK, PROCESSES, RESOURCES, HOST):
        programs |= kind
    return [
        Attack(name, program, name in HARMLESS, name == "notes for the next run") for name, program in programs.items()
    ]


ATTACKS = _attacks()
