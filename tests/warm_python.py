"""An executable that acts like `python` but starts with torch and credibly imported.

Importing torch takes two seconds of processor time, and some tests start a dozen programs. A server process imports it
once and forks for every program. The executable sends its arguments, environment, folder and standard streams to the
server, forwards signals, and ends as the program does; if it is killed, so is the program. Programs end by the normal
shutdown of the interpreter.

Programs differ from those of `sys.executable` in what is fixed when the interpreter starts: the hash seed, options
such as -W, and variables such as OMP_NUM_THREADS. Their parent is the server. Tests that depend on these use
`sys.executable`. What `credibly.methods` imports is in `sys.modules` from the start, so tests that a library is not
imported can fail as they should.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# The executable. -I and -S: it needs nothing but the standard library, and starts in 20 ms without the rest.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps({{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}).encode()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # Ctrl-C is forwarded even if a shell has turned it off, as it does for jobs started with &.
    if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
status = server.recv(4)
if not status:
    sys.exit("the server of warm interpreters has ended")
code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def warm_python(*prefix: str) -> str:
    """Return the path of the executable, whose server ends with this process. A prefix is a command to run it under."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    server = subprocess.Popen(
        [*prefix, sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    _servers.append(server)
    return str(folder / "python")


# Kept, so that the pipe to each server stays open until this process ends.
_servers: list[subprocess.Popen[bytes]] = []


def serve(folder: Path) -> dict[str, object]:
    """Fork for every request. Return in the child, with the request; the server itself never returns."""
    import torch.distributed.launcher.api  # noqa: F401

    import credibly.methods  # noqa: F401

    gc.collect()
    gc.freeze()  # collections in the children would copy the memory that they share with the server
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    executable = folder / "python"
    executable.write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket")))
    executable.chmod(0o700)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()
    for source in (listener, wake, 0):
        waiting.register(source, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        for key, _ in waiting.select():
            if key.fileobj == 0:  # the tests have ended
                for pid in clients:
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(folder)
                os._exit(0)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                head, streams, _, _ = socket.recv_fds(client, 8, 3)
                request = json.loads(_receive(client, int.from_bytes(head, "big")))
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (waiting, listener, *clients.values()):
                        other.close()
                    for descriptor in (wake, waker):
                        os.close(descriptor)
                    client.close()
                    return {**request, "streams": streams}
                for descriptor in streams:
                    os.close(descriptor)
                clients[pid] = client
                waiting.register(client, selectors.EVENT_READ, pid)
            elif key.fileobj == wake:
                os.read(wake, 4096)
                while clients:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    client = clients.pop(pid)
                    if client in waiting.get_map():
                        waiting.unregister(client)
                        client.sendall(status.to_bytes(4, "big"))
                    client.close()
            elif key.data in clients:
                received = clients[key.data].recv(64)
                if not received:  # the client was killed
                    waiting.unregister(clients[key.data])
                for number in received or [signal.SIGKILL]:
                    os.kill(key.data, number)


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        received += connection.recv(count - len(received))
    return received


def run(words: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> None:
    """Run `python words...` in this process."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-u":  # from torchrun
        words = words[1:]
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.argv, sys.path[:1] = words[1:], [folder, *paths]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[:1] = ["-c", *words[2:]], [folder, *paths]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:1] = words, [str(Path(words[0]).resolve().parent), *paths]
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(**serve(Path(sys.argv[1])))  # type: ignore[arg-type]
