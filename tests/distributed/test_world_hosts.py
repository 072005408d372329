"""Two hosts, as network namespaces joined by a virtual cable: the draws of one process, and the loss of a host.

Needs Linux, the `ip` tool and the right to create namespaces; skipped elsewhere.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import credibly as cr
from warm_python import warm_python

PROGRAMS = Path(__file__).parent / "world_programs.py"
NETWORK = "198.18.77"  # in the block reserved for network tests
PORT = 29477
LIMIT = 240  # seconds for a launch, on a loaded machine
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
]


class Host:
    """A network namespace with one address and no other network."""

    def __init__(self, number):
        self.name, self.device = f"credibly-{os.getpid()}-{number}", f"cr{number}{os.getpid() % 10**8}"
        self.address, self.hosts_store = f"{NETWORK}.{number}", number == 1

    def start(self, program, folder, *, nodes="2", restarts=0, **environment):
        """Start torchrun with one process on this host; the rendezvous store is on the first host."""
        on_host = ("ip", "netns", "exec", self.name)
        # A launcher that is killed must be the parent of its process.
        python = sys.executable if restarts else warm_python(*on_host)
        words = [
            *on_host,
            python,
            "-m",
            "torch.distributed.run",
            f"--nnodes={nodes}",
            "--nproc-per-node=1",
            f"--max-restarts={restarts}",
            "--rdzv-backend=c10d",
            "--rdzv-id=hosts",
            f"--rdzv-endpoint={NETWORK}.1:{PORT}",
            f"--local-addr={self.address}",
            f"--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,is_host={self.hosts_store}",
            str(PROGRAMS),
            program,
            str(folder),
        ]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("CREDIBLY_", "PYTEST_"))}
        variables = {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.device, "PYTHON_EXEC": python}
        return subprocess.Popen(
            words,
            env=variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)


@pytest.fixture(scope="module")
def hosts():
    """Two hosts and the cable between them, removed in any case."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the ip tool")
    pair = Host(1), Host(2)
    with ExitStack() as undo:
        for host in pair:
            made = ip("netns", "add", host.name)
            if made.returncode:
                pytest.skip(f"no network namespace can be created here: {made.stderr.strip()}")
            undo.callback(ip, "netns", "del", host.name)  # removes the cable too
        first, second = pair
        cable = ("link", "add", first.device, "netns", first.name, "type", "veth", "peer", "name", second.device)
        made = ip(*cable, "netns", second.name)
        if made.returncode:
            pytest.skip(f"no cable between namespaces can be created here: {made.stderr.strip()}")
        for host in pair:
            for words in (
                ("addr", "add", f"{host.address}/24", "dev", host.device),
                ("link", "set", host.device, "up"),
                ("link", "set", "lo", "up"),
            ):
                done = ip("-n", host.name, *words)
                assert done.returncode == 0, done.stderr
        yield pair


def end(*started):
    """Return the exit status and output of each process; leave none running."""
    ended = []
    try:
        for process in started:
            output, _ = process.communicate(timeout=LIMIT)
            ended.append((process.returncode, output))
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return ended


def alone(program, folder):
    folder.mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CREDIBLY_", "PYTEST_"))}
    subprocess.run(
        [warm_python(), str(PROGRAMS), program, str(folder)],
        env={**clean, "OMP_NUM_THREADS": "1"},
        timeout=LIMIT,
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The draws of one process."""
    return cr.load(alone("long", tmp_path_factory.mktemp("alone") / "run") / "long").draws


def test_hosts_see_each_other_and_nothing_else(hosts):
    first, second = hosts
    for here, there in ((first, second), (second, first)):
        routes = ip("-n", here.name, "route", "show").stdout.splitlines()
        assert len(routes) == 1
        assert here.device in routes[0]
        assert there.address not in ip("-n", here.name, "addr", "show").stdout


@pytest.mark.nightly
def test_chains_on_two_hosts_are_bit_for_bit_those_of_one_process(hosts, whole, tmp_path):
    ended = end(*(host.start("long", tmp_path) for host in hosts))
    assert [status for status, _ in ended] == [0, 0], ended
    assert torch.equal(cr.load(tmp_path / "long").draws, whole)
    written = {path.name for path in (tmp_path / "long").glob("draws-*")}
    assert written == {"draws-00000-c00000.safetensors", "draws-00000-c00002.safetensors"}  # each host wrote its own


def test_rows_on_two_hosts_change_rounding_only(hosts, tmp_path):
    expected = load_file(alone("rows", tmp_path / "one") / "rows-0.safetensors")["draws"]
    ended = end(*(host.start("rows", tmp_path, CREDIBLY_MESH="1x2") for host in hosts))
    assert [status for status, _ in ended] == [0, 0], ended
    found = [load_file(tmp_path / f"rows-{rank}.safetensors")["draws"] for rank in range(2)]
    assert torch.equal(found[0], found[1])  # both made the same decisions
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.nightly
def test_a_host_that_is_lost_with_its_launcher_changes_no_draw(hosts, whole, tmp_path):
    first, second = hosts
    stays = first.start("long", tmp_path, nodes="1:2", restarts=3)
    goes = second.start("long", tmp_path, nodes="1:2", restarts=3, HOST_DIES_AT="35")
    (status, output), (other, _) = end(stays, goes)
    assert other != 0
    assert status == 0, output[-3000:]
    assert torch.equal(cr.load(tmp_path / "long").draws, whole)
