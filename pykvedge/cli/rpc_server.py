"""The command `kvedge rpc-server` lends the devices of this machine."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys

import click

from pykvedge.cli import options
from pykvedge.cli.command import command, option
from pykvedge.errors import DeviceError, UsageError


@command("rpc-server")
@option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@option("--port", default=50052, show_default=True, type=click.IntRange(1, 65535))
@option("--device", default="auto", metavar="NAMES", help="Devices to lend, for example CUDA0; auto lends all devices.")
@options.taking(options.THREADS)
def rpc_server(host: str, port: int, device: str, threads: int | None) -> None:
    """Lend this machine's devices to `kvedge chat --rpc`.

    The devices hold layers of a model, and their keys and values, which are compressed on the devices. The server is
    llama.cpp's: it has no passwords and trusts every client, so run it in your own network only. It serves one program
    at a time; another program is refused after some seconds. Ctrl-C ends it.

    \b
    kvedge rpc-server --host 192.168.0.7              on the machine that lends
    kvedge chat --rpc 192.168.0.7:50052 "Hello"       on the one that asks
    """
    from pykvedge.native import ggml, llamacpp

    count = threads or llamacpp.default_threads()
    found = ggml.devices()
    lent = [d for d in found if d.kind != "CPU"] or found
    if device != "auto":
        names = options.listed("--device", device)
        lent = [d for d in found if d.name in names]
        if len(lent) < len(names):
            raise UsageError(f"--device {device} does not exist; this machine has {', '.join(d.name for d in found)}")
    try:
        alone = ipaddress.ip_address(host).is_loopback
    except ValueError:
        alone = host == "localhost"
    if not alone:
        click.echo("anyone who reaches this address can use it, and read and write its memory", err=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C must end C code from here on
    llamacpp.start(verbose=True, vision=False)  # the server's log names its reasons for a refusal
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the server prints its messages on stdout
    ggml.serve(f"{host}:{port}", [d.handle for d in lent], count)
    raise DeviceError(
        f"the server at {host}:{port} ended; check that the port is free and the address belongs to this machine"
    )
