"""Launches the real command from a process that has torch imported, so that a run costs a fraction of a second.

A run of two workers takes some ten seconds of processor time, nearly all of it for importing torch twice: in the
launcher and in its fork server. Tests that make hundreds of runs start one `WarmServer`. It forks a launcher for each
run, and the launcher's fork server is forked as well instead of started from scratch; from there on everything is the
product's own code. What is not covered here, starting from nothing, is covered by the tests in `tests/e2e`.

The processes of a run are related as always: the fork server is a child of the launcher and ends with it.
`start` and `run` use one server for all tests of a process, which is started when it is first needed.

`ForkingPopen` in the place of `subprocess.Popen` has that server fork every other Python process as well: servers of a
store, agents, sites of a federation, and the fork server of a run that a test starts in its own process. The fixture
`warm_processes` puts it there.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

FORK_SERVER = "cordee.cluster.engines.fork_server"
PRELOADED = ("torch", "torch.distributed", "sklearn.datasets", "cordee", "cordee.cli.app", "cordee.launch", FORK_SERVER)
PR_SET_PDEATHSIG = 1
# Variables that Python, torch or the C library read when a process starts. Another value needs a start from nothing.
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "TORCH_DEVICE_")
MAX_DESCRIPTORS = 64


class WarmProcess:
    """A launched command: what tests use of `subprocess.Popen`."""

    def __init__(self, server: WarmServer, pid: int, stdout: Path, stderr: Path) -> None:
        self._server = server
        self.pid = pid
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        self._output: Any = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("cordee", timeout or 0.0)
            time.sleep(0.005)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was printed to standard output and standard error, and remove the files."""
        self.wait(timeout)
        if self._output is None:
            self._output = tuple(path.read_text(errors="replace") for path in (self.stdout, self.stderr))
            self.stdout.unlink(missing_ok=True)
            self.stderr.unlink(missing_ok=True)
        return self._output

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()


class WarmServer:
    """Starts commands. Leaving the context kills those that are left; their fork servers end with them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket, self._received = ours, b""
        self.forker, forking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._outputs = tempfile.TemporaryDirectory(prefix="warm-launch-")
        self._num_started = 0
        descriptors = [theirs.fileno(), forking.fileno()]
        self._process = StartingPopen(
            [sys.executable, "-P", __file__, *map(str, descriptors)], pass_fds=descriptors, stdin=subprocess.DEVNULL
        )
        theirs.close()
        forking.close()

    def cordee(self, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> WarmProcess:
        """Run `cordee ARGUMENTS` in the working folder `folder`."""
        return self._launch({"arguments": ["cordee", *arguments]}, folder, environment)

    def python(self, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> WarmProcess:
        """Run `python SCRIPT ARGUMENTS` likewise."""
        return self._launch({"arguments": list(arguments), "script": arguments[0]}, folder, environment)

    def exit_code(self, pid: int) -> int | None:
        """Return how a launched process ended: its exit code, or minus the signal; None while it runs."""
        with self._lock:
            self._hear(0.0)
            return self._codes.get(pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._socket.close()
        self.forker.close()
        self._process.wait(timeout=30)
        self._outputs.cleanup()

    def _launch(self, request: dict[str, Any], folder: Path, environment: Mapping[str, str] | None) -> WarmProcess:
        with self._lock:
            self._num_started += 1
            number = self._num_started
        stdout, stderr = (Path(self._outputs.name) / f"{name}-{number}" for name in ("stdout", "stderr"))
        request |= {"folder": str(folder), "stdout": str(stdout), "stderr": str(stderr)}
        request["environment"] = dict(os.environ if environment is None else environment)
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            pid = None
            while pid is None:
                pid = self._hear(60.0)
        return WarmProcess(self, pid, stdout, stderr)

    def _hear(self, timeout_s: float) -> int | None:
        """Take in what the server says; return the pid of a process that was started."""
        started = None
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        chunk = self._socket.recv(65536)
        assert chunk, "the warm server died"
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "started" in said:
                started = said["started"]
                self._codes.pop(started, None)  # of an earlier process: the system uses numbers again
            else:
                self._codes[said["pid"]] = said["code"]
        return started

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_shared: WarmServer | None = None
_sharing = threading.Lock()


def shared_server() -> WarmServer:
    """Return the server of this process, which `close_shared` ends."""
    global _shared
    with _sharing:  # some tests run commands in threads
        if _shared is None:
            _shared = WarmServer()
        return _shared


def close_shared() -> None:
    global _shared
    if _shared is not None:
        _shared.close()
        _shared = None


def shared_pid() -> int | None:
    """Return the process of the shared server, if there is one."""
    return None if _shared is None else _shared.pid


def start(*arguments: object, folder: Path, environment: Mapping[str, str] | None = None) -> WarmProcess:
    """Start `cordee ARGUMENTS` in the working folder `folder`."""
    return shared_server().cordee(*map(str, arguments), folder=folder, environment=environment)


def run(
    *arguments: object, folder: Path, environment: Mapping[str, str] | None = None, timeout: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run `cordee ARGUMENTS` to its end."""
    process = start(*arguments, folder=folder, environment=environment)
    try:
        stdout, stderr = process.communicate(timeout)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(list(arguments), process.returncode or 0, stdout, stderr)


def serve(control: socket.socket, forking: socket.socket) -> None:
    """Fork launchers until the other side hangs up. Has no threads and does not use torch, so that forking is safe."""
    children: set[int] = set()
    parent_pid = os.getppid()
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_in, False)
    os.set_blocking(wake_out, False)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    received = b""
    while True:
        readable, _, _ = select.select([control, forking, wake_in], [], [])
        if wake_in in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_in, 4096)
            for pid in list(children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                    control.sendall(json.dumps({"pid": pid, "code": code}).encode() + b"\n")
        if forking in readable:
            fork_on_request(forking, parent_pid, (control.fileno(), wake_in, wake_out))
        if control in readable:
            chunk = control.recv(1 << 20)
            if not chunk:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                request, parent = json.loads(line), os.getpid()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for descriptor in (control.fileno(), forking.fileno(), wake_in, wake_out):
                        os.close(descriptor)
                    _be_launcher(request, parent)
                children.add(pid)
                control.sendall(json.dumps({"started": pid}).encode() + b"\n")


def _be_launcher(request: Mapping[str, Any], parent: int) -> NoReturn:
    _end_with(parent)
    _set_environment(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(file, descriptor)
    os.setsid()  # a terminal's Ctrl-C is for the tests
    _start_forker()
    sys.argv = list(request["arguments"])
    script = request.get("script")

    def run() -> None:
        if script is not None:
            sys.path.insert(0, str(Path(script).resolve().parent))
            _run_main("", script)
        else:
            importlib.import_module("cordee.cli").main()

    _run_and_exit(run)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the new environment
    points = importlib.import_module("cordee.core.fault_points")
    points._folder = importlib.import_module("cordee.core.env").faults_folder()  # what it reads on import


def _run_and_exit(run: Any) -> NoReturn:
    code = 1
    try:
        run()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            sys.stderr.write(leaving.code + "\n")
    except BaseException:  # noqa: BLE001 - the last frame of a process
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class PythonCommand(NamedTuple):
    """What a command line has Python run: a module, a text, or a file."""

    option: str  # "-m", "-c", or "" for a file
    subject: str
    arguments: list[str]
    is_safe: bool  # -P: the folder of the script, or the working folder, is not searched for modules
    is_unbuffered: bool

    @classmethod
    def parse(cls, args: Any) -> PythonCommand | None:
        """Return None for what is no command of this Python, or has other options."""
        if isinstance(args, (str, bytes, os.PathLike)):
            return None
        python, *words = map(os.fspath, args)
        if python != sys.executable:
            return None
        options = set()
        while words and words[0] in ("-P", "-u"):
            options.add(words.pop(0))
        option = words.pop(0) if words and words[0] in ("-c", "-m") else ""
        if not words or (not option and words[0].startswith("-")):
            return None
        return cls(option, words[0], words[1:], "-P" in options, "-u" in options)


StartingPopen = subprocess.Popen  # before anything takes its place


class ForkingPopen(StartingPopen):  # type: ignore[type-arg]
    """Like the original, but a process of this Python is forked from one that has imported torch.

    What that one makes is handed to this process as its own child, which can be waited for. In a test it is the server
    that all tests share. In a process that the server has forked it is `forker`, its child from before it had threads.
    """

    forker: socket.socket | None = None
    owner = os.getpid()  # whose children they become: a fork of this process starts its own from nothing
    _forking = threading.Lock()

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        *rest: Any,
    ) -> None:  # type: ignore[override]
        *pipes, _, gid, gids, uid, umask, is_session, group = rest
        environment = dict(os.environ if env is None else env)
        is_special = shell or preexec_fn or executable or gid or gids or uid or umask != -1
        is_special = is_special or os.getpid() != ForkingPopen.owner or _needs_own_start(environment)
        command = None if is_special else PythonCommand.parse(args)
        if command is None:
            more = (close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest)
            super()._execute_child(args, executable, preexec_fn, *more)  # type: ignore[misc]
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        given = {number: fd if fd != -1 else number for number, fd in enumerate((p2cread, c2pwrite, errwrite))}
        given |= {fd: fd for fd in pass_fds}
        request = {
            "command": command,
            "descriptors": list(given),
            "environment": environment,
            "folder": str(Path(cwd or ".").absolute()),
            "is_session": is_session,
            "group": group,
        }
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given.values()))]
        adopt_orphans = importlib.import_module(FORK_SERVER).adopt_orphans
        with ForkingPopen._forking:
            forker = ForkingPopen.forker or shared_server().forker
            did_adopt = adopt_orphans(True)
            forker.sendmsg([json.dumps(request).encode()], sent)
            self.pid = int(forker.recv(64))
            with contextlib.suppress(OSError):  # a process that has not been handed over yet cannot be waited for
                while f"\nPPid:\t{os.getpid()}\n" not in Path(f"/proc/{self.pid}/status").read_text():
                    time.sleep(0.001)
            adopt_orphans(did_adopt)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _needs_own_start(environment: Mapping[str, str]) -> bool:
    """Whether a process of this environment is to be started from nothing.

    It is where Python would read a `sitecustomize` at its start, or other values of what is read there.
    """
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    if any((Path(folder) / "sitecustomize.py").exists() for folder in folders if folder):
        return True
    names = {name for name in environment.keys() ^ os.environ.keys() if name.startswith(READ_AT_START)}
    names |= {name for name, value in os.environ.items() if environment.get(name, value) != value}
    return any(name.startswith(READ_AT_START) and name != "PYTHONPATH" for name in names)


def _start_forker() -> None:
    """Have the Python processes of this one forked from a process that is like it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    importlib.import_module(FORK_SERVER).adopt_orphans(True)  # what the forker leaves behind is this process's
    launcher = os.getpid()
    if os.fork():
        theirs.close()
        ours.set_inheritable(False)
        ForkingPopen.forker, ForkingPopen.owner = ours, launcher
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        return
    ours.close()
    _end_with(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    while fork_on_request(theirs, launcher):
        pass
    os._exit(0)


def fork_on_request(link: socket.socket, parent: int, own: Sequence[int] = ()) -> bool:
    """Fork the process that `link` asks for, as a child of `parent`, without the descriptors in `own`.

    Returns False where the other end has hung up.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = link.recvmsg(1 << 20, space)
    if not data:
        return False
    descriptors = array.array("i")
    for _, _, raw in ancillary:
        descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            link.send(str(pid).encode())
            os._exit(0)
        signal.set_wakeup_fd(-1)
        for descriptor in own:
            os.close(descriptor)
        _be_python(json.loads(data), list(descriptors), link, parent)
    os.waitpid(middle, 0)
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def _be_python(request: Mapping[str, Any], descriptors: Sequence[int], link: socket.socket, parent: int) -> NoReturn:
    while os.getppid() != parent:  # the process in between has not ended yet
        if not Path(f"/proc/{parent}").exists():
            os._exit(1)
        time.sleep(0.001)
    link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["is_session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    above = 1 + max(request["descriptors"])
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(kept, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _set_environment(request["environment"])
    os.chdir(request["folder"])
    sys.modules["numpy"].random.seed()  # Python's own random numbers are seeded again in a fork, NumPy's are not
    if "OMP_NUM_THREADS" in os.environ:  # which torch has read by now
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    command = PythonCommand(*request["command"])
    if command.is_unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv = [command.option or command.subject, *command.arguments]
    sys.path[:0] = _searched(command)
    if command.subject == FORK_SERVER:
        subprocess.Popen = StartingPopen  # type: ignore[misc]
        _run_and_exit(importlib.import_module(FORK_SERVER).main)
    _start_forker()
    _run_and_exit(lambda: _run_main(command.option, command.subject))


def _searched(command: PythonCommand) -> list[str]:
    """Return the folders that Python would search first: that of the script, or the working folder; PYTHONPATH."""
    folder = {"-c": "", "-m": str(Path.cwd()), "": str(Path(command.subject).resolve().parent)}[command.option]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    return [*([] if command.is_safe else [folder]), *(str(Path(path).absolute()) for path in paths)]


def _run_main(option: str, subject: str) -> None:
    """Run a module, a text or a file as the main module, whose variables live until the process ends."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if option == "-m":
        if not hasattr(sys.modules.get(subject), "__path__"):
            sys.modules.pop(subject, None)  # as if it had not been imported
        runpy._run_module_as_main(subject)  # type: ignore[attr-defined]  # what Python itself calls
    elif option == "-c":
        exec(compile(subject, "<string>", "exec"), vars(main))
    else:
        main.__file__ = str(Path(subject).absolute())
        exec(compile(Path(subject).read_bytes(), main.__file__, "exec"), vars(main))


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    # It ends when the other side hangs up. Asking the kernel for a signal would end it with the thread that started it.
    for name in PRELOADED:
        importlib.import_module(name)
    for name in (
        *importlib.import_module(FORK_SERVER).PRELOADED,
        *importlib.import_module("cordee.runs").PROCESS_MODULES,
    ):
        importlib.import_module(name)
    serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))


if __name__ == "__main__":
    main()
