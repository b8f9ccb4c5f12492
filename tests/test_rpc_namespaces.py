"""Two RPC servers in network namespaces, as on separate hosts. Each has memory for only a part of the KV pairs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waits import until

MIB = 2**20
PORT = 50052

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("ip"),
    reason="makes network namespaces, as root with iproute2",
)


def _namespace(pid: object) -> Path:
    return Path(f"/proc/{pid}/ns/net").readlink()


class Host:
    """A network namespace. It exists as long as a sleeping process in it."""

    def __init__(self) -> None:
        self._sleeper = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        self.processes = [self._sleeper]
        until(lambda: _namespace(self._sleeper.pid) != _namespace("self"))

    @property
    def name(self) -> str:
        return str(self._sleeper.pid)

    def command(self, *words) -> list[str]:
        return ["nsenter", "--target", self.name, "--net", *map(str, words)]

    def run(self, *words) -> None:
        subprocess.run(self.command(*words), check=True, capture_output=True)

    def start(self, *words, **options) -> subprocess.Popen:
        self.processes.append(subprocess.Popen(self.command(*words), **options))
        return self.processes[-1]

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def connect(client: Host, server: Host, number: int) -> str:
    """Connects two hosts by a cable. Returns the server's address."""
    cable = f"kv{number}"
    client.run("ip", "link", "add", cable, "type", "veth", "peer", "name", cable, "netns", server.name)
    for host, last in ((client, 1), (server, 2)):
        host.run("ip", "address", "add", f"10.77.{number}.{last}/24", "dev", cable)
        host.run("ip", "link", "set", cable, "up")
    server.run("ip", "link", "set", "lo", "up")
    return f"10.77.{number}.2"


class Lender:
    """A server on a host. It may use `room` bytes more than when it begins to listen."""

    def __init__(self, host: Host, address: str, room: int, environment) -> None:
        self.endpoint = f"{address}:{PORT}"
        self.process = host.start(
            sys.executable, "-m", "pykvedge", "rpc-server", "--host", address, "--port", PORT, "--threads", 1,
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        there = psutil.Process(self.process.pid)
        until(lambda: _listens(self.process.pid))
        size = there.memory_info().vms
        there.rlimit(psutil.RLIMIT_AS, (size + room, size + room))


def _listens(pid: int) -> bool:
    """Returns whether a socket in the process's namespace listens at PORT."""
    table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()
    return any(f":{PORT:04X} " in line and " 0A " in line for line in table)


@pytest.fixture
def hosts(environment):
    """Yields (hosts, addresses of the servers). The first host is the client."""
    try:
        made = [Host() for _ in range(3)]
    except OSError:
        pytest.skip("network namespaces are not to be had here")
    try:
        addresses = [connect(made[0], made[i], i) for i in (1, 2)]
    except subprocess.CalledProcessError as error:
        for host in made:
            host.close()
        pytest.skip(f"network namespaces cannot be connected here: {error.stderr!r}")
    yield made, addresses
    for host in made:
        host.close()


def chat(client, files, lenders, environment, *options) -> subprocess.Popen:
    return client.start(
        sys.executable, "-m", "pykvedge", "chat", *files.arguments(), "--ctx", 8000, "--kv-type", "f32",
        "--rpc", ",".join(lender.endpoint for lender in lenders), *options,
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.whole  # test_rpc_clients and test_device_failures test full servers on this host
def test_a_cache_that_one_host_cannot_hold(native, tiny, environment, hosts):
    """More than 150 MiB of keys and values, and 150 MiB on each host: one server refuses, two answer as this machine.

    When one of two servers dies, the answer ends with one line.
    """
    (client, *servers), addresses = hosts
    files = tiny("llama", n_layers=24, n_heads=4, n_heads_kv=4, head_size=64)
    prompt = "word " * 1150
    lenders = [Lender(host, at, 150 * MIB, environment) for host, at in zip(servers, addresses, strict=True)]

    out, err = chat(client, files, lenders[:1], environment, "--method", "full", "--json", prompt).communicate(
        timeout=120
    )
    assert out == "" and "device RPC0 has no memory" in err and err.count("\n") == 1, err

    told = chat(client, files, lenders, environment, "--method", "full", "--max-tokens", 8, "--json", prompt)
    out, err = told.communicate(timeout=200)
    assert told.returncode == 0, err
    answer = json.loads(out)
    assert answer["kv"]["full_bytes"] > 150 * MIB
    here = subprocess.run(
        [sys.executable, "-m", "pykvedge", "chat", *map(str, files.arguments()), "--ctx", "8000", "--kv-type", "f32",
         "--method", "full", "--max-tokens", "8", "--json", prompt],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(here.stdout)["text"] == answer["text"]

    talking = chat(client, files, lenders, environment, "--method", "knorm", "--max-tokens", 5000, "hello")
    assert talking.stdout.read(1)
    lenders[1].process.kill()
    _, err = talking.communicate(timeout=60)
    assert talking.returncode == 1
    assert err.splitlines()[-1].startswith("kvedge: error: llama.cpp had to stop"), err
