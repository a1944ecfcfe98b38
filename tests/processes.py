# SPDX-License-Identifier: Apache-2.0
"""Forks Python processes from a server that has imported torch, so that they start in a tenth of the time.

`PythonServer.python` is an executable that replaces `sys.executable`. The server forks a process for each of its runs
(of -m MODULE, -c CODE or a file), with the caller's arguments, environment variables, folder and open files. In that
process `sys.executable` is this executable again, so that a command's ranks are forked too. To its caller the
executable behaves like the forked process: it passes signals on, ends with the process's status, and ends the process
when it is killed (shortly after, which is the only difference from Python).

Imported modules have read environment variables as the server had them. A run with other values of FIXED, or with other
options of Python, is therefore given to Python itself.

A server is a Python of its own, which imports the modules before its first run; or it is forked from pytest, which has
imported most of them while it collected the tests (`PythonServer.fork`), or from another server.

There are three shared servers: one has imported torch alone, for programs that import Stretto themselves (from another
folder, with a module replaced, or to interpret kernels), and is forked before pytest collects the tests; one has
imported Stretto's commands, too, and what their ranks train by; and one has done so with kernels that are interpreted.
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import logging
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

FIXED = ("TRITON_INTERPRET", "TORCH_DISTRIBUTED_DEBUG", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "LD_PRELOAD")
ROOT = Path(__file__).parents[1]
LIMIT = 1200.0  # seconds for what must come: machines are slow and loaded, and caches empty
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)

CLIENT = """#!{python} -SE
import os, signal, socket, struct, sys
from json import dumps

def run_python():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

variables = dict(os.environ)
is_safe = False
while sys.argv[1:2] in (["-B"], ["-P"], ["-u"]):  # multiprocessing passes on -B, torchrun -u
    option = sys.argv.pop(1)
    is_safe |= option == "-P"
    if option == "-u":
        variables["PYTHONUNBUFFERED"] = "1"
if {{name: variables.get(name) for name in {fixed}}} != {values} or not sys.argv[1:]:
    run_python()
if sys.argv[1] not in ("-m", "-c") and sys.argv[1].startswith("-"):
    run_python()
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
inherited = []
for descriptor in descriptors:
    try:
        if os.get_inheritable(descriptor):
            inherited.append(descriptor)
    except OSError:  # of the listing itself
        pass
request = dumps({{"arguments": sys.argv[1:], "variables": variables, "folder": os.getcwd(), "descriptors": inherited,
                 "client": os.getpid(), "is_safe": is_safe}}).encode()
socket.send_fds(server, [struct.pack("!I", len(request))], inherited)
server.sendall(request)
for descriptor in inherited:
    if descriptor > 2:
        os.close(descriptor)
def forward(number, frame):
    try:
        server.sendall(bytes([number]))
    except OSError:  # the program has just ended: its status is on its way
        pass
for number in {forwarded}:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, forward)
status = b""
while len(status) < 4:
    part = server.recv(4 - len(status))
    if not part:
        os._exit(255)  # the server is gone
    status += part
code = struct.unpack("!i", status)[0]
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
    signal.pause()
os._exit(code)
"""


def find_free_port() -> int:
    """A port on which nobody listens, and none of those that systems give to connections and listeners meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 16_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("localhost", port))
            return port


class PythonServer:
    """Forks Python processes that have imported `modules`. variables: added to this process's environment.

    fixed: variables that a forked process must have as the server has them. origin: the kind of the shared server that
    forks this one, which is closed before it; None for a server that is a Python of its own. It starts with the first
    use of `python`, or with `fork`. `close` ends it, and all that runs in its processes.
    """

    def __init__(
        self,
        modules: list[str],
        variables: dict[str, str] | None = None,
        fixed: tuple[str, ...] = FIXED,
        origin: str | None = None,
    ) -> None:
        self._modules = modules
        self._variables = variables or {}
        self._fixed = fixed
        self._origin = origin
        self._folder: str | None = None
        self._pid: int | None = None

    @property
    def python(self) -> str:
        if self._folder is None:
            self._start()
        return str(Path(self._folder or "", "python"))

    @property
    def is_started(self) -> bool:
        return self._pid is not None

    def fork(self) -> None:
        """Start the server as a fork of this process, with all that it has imported, rather than as a Python.

        Before this process has threads or has run a backward pass: in what is forked after one, torch refuses another.
        """
        self._start(is_forked=True)

    def process_of(self, executable: int) -> int:
        """The id of the forked process behind the `executable` with this process id."""
        file = Path(self._folder or "", str(executable))
        deadline = time.monotonic() + LIMIT
        while not (file.exists() and file.read_text()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"process {executable} does not stand for a process of this server")
            time.sleep(0.01)
        return int(file.read_text())

    def close(self) -> None:
        if self._pid is None or self._folder is None:
            return
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        shutil.rmtree(self._folder)
        self._pid = self._folder = None

    def _start(self, is_forked: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="stretto-python-", dir="/tmp")  # sockets' names are short
        address = str(Path(self._folder, "socket"))
        variables = os.environ | self._variables
        arguments = [address, str(os.getpid()), *self._modules]
        if is_forked:
            self._pid = fork_program(lambda: _serve_in_fork(arguments, variables))
        else:
            python = sys.executable if self._origin is None else shared_server(self._origin).python
            self._pid = os.posix_spawn(python, [python, __file__, *arguments], variables, setsid=True)
        deadline = time.monotonic() + LIMIT
        while not os.path.exists(address):
            if os.waitpid(self._pid, os.WNOHANG)[0] or time.monotonic() > deadline:
                raise RuntimeError("the server of Python processes did not start")
            time.sleep(0.02)
        file = Path(self._folder, "python")
        values = {name: variables.get(name) for name in self._fixed}
        forwarded = [int(number) for number in FORWARDED]
        file.write_text(
            CLIENT.format(python=sys.executable, fixed=self._fixed, values=values, address=address, forwarded=forwarded)
        )
        file.chmod(0o755)


def fork_program(program: Callable[[], object], descriptors: tuple[int, ...] = ()) -> int:
    """Run a function in a forked process, which keeps these open files and the standard ones; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # What this process has open stays open for its parent alone; the numbers stay taken for who still has them.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in (nothing, *descriptors):
                with contextlib.suppress(OSError):  # of the listing itself
                    os.fstat(descriptor)
                    os.dup2(nothing, descriptor)
        atexit._clear()
        program()
    finally:
        os._exit(0)


_TORCH = [
    "torch.distributed.tensor",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    # What commands and ranks import, too. Not torch._dynamo: it imports Triton, which then interprets kernels, or not.
    "torch.distributed.checkpoint",
    "rich.console",
    "pydantic",
]
_COMMANDS = [*_TORCH, "stretto.cli.train", "stretto.cli.running", "stretto.launch.rank", "stretto.train.trainer"]
_KINDS: dict[str, Callable[[], PythonServer]] = {
    # Stretto's backend is registered in the forked processes, as in those that import torch themselves (`_become`).
    "torch": lambda: PythonServer(
        _TORCH, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, tuple(name for name in FIXED if name != "TRITON_INTERPRET")
    ),
    "commands": lambda: PythonServer(_COMMANDS),
    "interpreted commands": lambda: PythonServer(
        [*_COMMANDS, "stretto.tiles", "triton.experimental.gluon"], {"TRITON_INTERPRET": "1"}, origin="torch"
    ),
}
_SERVERS: dict[str, PythonServer] = {}
"""The session's servers, by kind."""


def shared_server(kind: str = "commands") -> PythonServer:
    """The session's server of this kind: "torch", "commands" or "interpreted commands"."""
    if kind not in _SERVERS:
        _SERVERS[kind] = _KINDS[kind]()
    return _SERVERS[kind]


def forks_processes() -> bool:
    """True if `sys.executable` is a server's, whose processes end only shortly after it was killed."""
    return any(server.is_started and sys.executable == server.python for server in _SERVERS.values())


def close_servers() -> None:
    """End the session's servers, if any were started."""
    for server in reversed(_SERVERS.values()):  # one that was forked from another before that one
        server.close()
    _SERVERS.clear()


# What follows runs in the server, and in the processes that it forks.


class _Server:
    """Serves a connection for each client: receives a request and signals, and sends the process's exit status."""

    def __init__(self, address: str, parent: int) -> None:
        self._parent = parent
        self._folder = Path(address).parent
        self._processes: dict[int, tuple[socket.socket, Path]] = {}  # and where the process id is written
        self._selector = selectors.DefaultSelector()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))
        self._own = [reader, writer]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address + "-")
        self._listener.listen(64)
        os.rename(address + "-", address)  # once it listens
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._request: tuple[dict[str, Any], list[int]] | None = None

    def wait(self) -> None:
        while not any(key.data == self._accept for key, _ in self._selector.select(1.0)):
            if os.getppid() != self._parent:
                self._end()

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Serve requests. Returns only in a forked process: what to run, and its open files."""
        while True:
            for key, _ in self._selector.select(1.0):
                key.data()
                if self._request is not None:
                    return self._request
            self._reap()
            if os.getppid() != self._parent:
                self._end()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(100.0)
        descriptors: list[int] = []
        is_forked = False
        with contextlib.suppress(OSError, ValueError, struct.error):  # a client that was killed meanwhile
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 250)
            size = struct.unpack("!I", head)[0]
            text = b""
            while len(text) < size:
                part = connection.recv(size - len(text))
                if not part:
                    raise OSError
                text += part
            request = json.loads(text)
            # Signals wait until the child has its own handlers: the server's would end the server's other processes.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
            pid = os.fork()
            if pid == 0:
                self._request = request, descriptors
                self._detach(connection)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                return
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            is_forked = True
            file = self._folder / str(request["client"])
            file.write_text(str(pid))
            self._processes[pid] = connection, file
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._forward_signals(pid, connection))
        for descriptor in descriptors:
            os.close(descriptor)
        if not is_forked:
            connection.close()

    def _forward_signals(self, pid: int, connection: socket.socket) -> None:
        """Pass the client's signals on to the process; kill it with all its children if the client is gone."""
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        for number in numbers:
            os.kill(pid, number)
        if not numbers:
            self._selector.unregister(connection)
            _kill(pid)

    def _reap(self) -> None:
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection, file = self._processes.pop(pid)
            file.unlink()
            with contextlib.suppress(OSError, KeyError):
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
            connection.close()

    def _end(self) -> None:
        for pid in self._processes:
            _kill(pid)
        os._exit(0)

    def _detach(self, connection: socket.socket) -> None:
        """Close the server's files in a forked process."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self._listener.close()
        for other in (connection, *(other for other, _ in self._processes.values())):
            other.close()
        for descriptor in self._own:
            os.close(descriptor)


def _kill(pid: int) -> None:
    """Kill a forked process that was not waited for yet, and all processes that it has started."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it had not begun its session yet
        os.killpg(pid, signal.SIGKILL)


def _become(request: dict[str, Any], descriptors: list[int], python: str, base_path: list[str]) -> None:
    """Give this process the arguments, environment, folder and files that Python would have had."""
    torch = sys.modules.get("torch")
    lacks_backends = torch is not None and not torch._is_device_backend_autoload_enabled()
    places = request["descriptors"]
    spare = max([*places, *descriptors]) + 1
    moved = [os.dup2(descriptor, spare + index) for index, descriptor in enumerate(descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, place in zip(moved, places, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")[0]
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=is_unbuffered)
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False
    )
    sys.executable = python
    client = request["client"]
    # Who looks for its parent finds the client's.
    os.getppid = lambda: int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[1])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if torch is not None and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *base_path]
    if lacks_backends and torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()


def _run(arguments: list[str], is_safe: bool) -> NoReturn:
    """Run the program and end as Python would, without tearing down its modules, which would take a second."""
    status = 0
    try:
        _call(arguments, is_safe)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  (Python's own way)
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _call(arguments: list[str], is_safe: bool) -> None:
    """Run the program. is_safe: its folder is not on the path, as by Python's -P."""
    if arguments[0] == "-m":
        _add_to_path(os.getcwd(), is_safe)
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        _add_to_path("", is_safe)
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        _add_to_path(str(Path(arguments[0]).resolve().parent), is_safe)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _add_to_path(folder: str, is_safe: bool) -> None:
    if not is_safe:
        sys.path.insert(0, folder)


def _serve_in_fork(arguments: list[str], variables: dict[str, str]) -> None:
    """Serve in a process that was forked from pytest, and give it what a new Python has instead of pytest's own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    faulthandler.disable()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # who needs them finds them by its own path
    _serve(arguments, [path for path in sys.path if path not in ("", os.getcwd(), str(ROOT))])


def _serve(arguments: list[str], path: list[str]) -> None:
    """Run the server, and in the processes that it forks their programs. path: where modules are found."""
    address, parent, *modules = arguments
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base_path = [folder for folder in path if folder not in given]
    server = _Server(address, int(parent))
    server.wait()
    gc.disable()  # what is imported is no garbage
    for name in modules:
        import_module(name)
    _name_methods_without_sources()
    gc.freeze()
    gc.enable()
    request, descriptors = server.serve()
    _become(request, descriptors, str(Path(address).with_name("python")), base_path)
    _run(request["arguments"], request["is_safe"])


def _name_methods_without_sources() -> None:
    """Have torchrun's rendezvous name its callers by their code alone.

    It lists the stack with the source of each frame, for which inspect goes through all modules: seconds with thousands
    of them.
    """
    rendezvous = sys.modules.get("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    if rendezvous is not None:
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


if __name__ == "__main__":
    _serve(sys.argv[1:], sys.path[1:])
