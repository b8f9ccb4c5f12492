"""Runs the server process: its socket, its signals, its end, and its messages to the parent process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvicorn

from pykvedge.caches.folder import CacheFolder
from pykvedge.errors import KvedgeError, UsageError
from pykvedge.models.dialect import Dialects
from pykvedge.models.documents import PageSize
from pykvedge.plans.plan import Plan
from pykvedge.runtime.drafting import check_policy
from pykvedge.runtime.loaded import LoadedModel
from pykvedge.runtime.sampling import Sampling
from pykvedge.runtime.sessionlock import try_lock
from pykvedge.serve import idle, tools
from pykvedge.serve.app import application
from pykvedge.serve.asking import Defaults
from pykvedge.serve.bodies import Bounds
from pykvedge.serve.guarding import Key, Rules, is_loopback
from pykvedge.serve.job import Limits
from pykvedge.serve.parked import Park
from pykvedge.serve.pictures import Sources
from pykvedge.serve.protocol import CONNECTIONS, Protocol
from pykvedge.serve.scheduler import Scheduler
from pykvedge.serve.service import Service
from pykvedge.system import memory, parent
from pykvedge.system.version import package_version

if sys.platform == "win32":
    _run_loop = asyncio.run
else:
    from uvloop import run as _run_loop  # gives a tenth more answers than asyncio's loop

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*,]+")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_PARK_PREFIX, _PARK_LOCK = "kvedge-park-", "lock"  # name of a server's temporary folder, and a file in it


@dataclass(frozen=True)
class Options:
    """Options of a server. hosts: further names in the Host header. origins: pages that may ask. park: folder for
    parked conversations; None: a temporary folder. grace: seconds that answers may take after a signal. tuned: note
    about a plan that `kvedge tune` chose. tune: arguments of `kvedge tune`, which runs in idle time; empty: no tuning.
    """

    host: str = "127.0.0.1"
    port: int = 8137
    name: str = ""
    keys: tuple[Key, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    sources: Sources = field(default_factory=Sources)
    park: Path | None = None
    park_size: int = 4 << 30
    max_tokens: int = 0
    max_body: int = 64 << 20
    grace: float = 10.0
    parent: int = 0
    strict: bool = False
    tuned: str = ""
    tune: tuple[str, ...] = ()


def check(options: Options, plan: Plan) -> None:
    """Raises UsageError for invalid options, before a model is loaded."""
    if not is_loopback(options.host) and not options.keys:
        raise UsageError(
            f"on {options.host} other machines can use the server: give API keys with --key-file FILE, or listen on "
            f"127.0.0.1"
        )
    if options.limits.exact:
        if options.limits.keep is None:
            raise UsageError("--exact needs uncompressed KV rows: add --keep ram or --keep disk")
        check_policy(plan, "--exact")
    for origin in options.origins:
        if origin not in ("*", "null", "localhost") and not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--allow-origin {origin} is invalid: write https://NAME:PORT, localhost, or * for all")


def serve(model: LoadedModel, plan: Plan, sampling: Sampling, options: Options, say: Callable[[str], None]) -> None:
    """Answers requests until a signal, the parent's end, or the end of a stdin that is a pipe.

    Prints one line of JSON with its address on stdout. say: prints a line for people. Raises KvedgeError if it cannot
    listen."""
    memory.free_at_once(1 << 20)  # frees old pictures, which heaps of threads would keep
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(_listening(options))
        folder = _park_folder(options.park) if options.park else stack.enter_context(own_folder())
        files = CacheFolder(folder, options.park_size, durable=False)
        park = Park(files, say)
        scheduler = Scheduler(model, options.limits, park)
        ended = threading.Event()
        try:
            service = _service(scheduler, plan, sampling, options)
            address = _address(listening)
            # starts before the parent learns the address: the parent may end at once
            with parent.watched(options.parent, ended), idle.tuning(scheduler, options.tune, say):
                told = {"url": address, "model": service.name, "pid": os.getpid(), "version": package_version()}
                print(json.dumps(told), flush=True)
                say(f"{service.name} answers at {address} (Ctrl-C ends it)")
                _run_loop(_run(service, options, listening, ended, say))
        finally:
            scheduler.close()
            for note in files.notes():
                say(note)


def _park_folder(path: Path) -> Path:
    """Makes the folder of --park, and checks that it is writable. Raises KvedgeError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise KvedgeError(f"--park {path} cannot be used: {why}; name another folder") from None


def _service(scheduler: Scheduler, plan: Plan, sampling: Sampling, options: Options) -> Service:
    model = scheduler.loan.model
    source = model.chat_template()
    dialects = Dialects(model, source, lambda dialect: tools.form_fits(dialect, model)) if source else None
    encoder = scheduler.loan.encoder
    size = PageSize.of(encoder.header, encoder.limits) if encoder is not None else PageSize()
    sources = replace(options.sources, page_size=size)
    room, name = options.limits.n_ctx, options.name or model.path.stem
    defaults = Defaults(plan, sampling, sources, options.max_tokens, room, dialects, options.tuned, name)
    fingerprint = f"kvedge-{package_version()}-{scheduler.preparer.model_name[:12]}"
    return Service(scheduler, defaults, name, fingerprint, options.strict)


@contextlib.contextmanager
def _listening(options: Options) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((options.host, options.port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise KvedgeError(
            f"cannot listen on {options.host} port {options.port}: {why}; choose another --port"
        ) from None
    with listening:
        yield listening


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _run(
    service: Service, options: Options, listening: socket.socket, ended: threading.Event, say: Callable[[str], None]
) -> None:
    rules = Rules(_host_names(options, listening), options.keys, options.origins, options.max_body,
                  bounds=Bounds.of(options.limits.n_ctx))  # fmt: skip
    config = uvicorn.Config(
        application(service, rules), log_config=None, access_log=False, server_header=False, date_header=False,
        lifespan="off", timeout_keep_alive=30, limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=5,
        http=functools.partial(Protocol, waiting={}), ws="none", loop="none",  # type: ignore[arg-type]
    )  # fmt: skip
    server = _Server(config)
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # stderr is for messages to people
    logging.getLogger("uvicorn").propagate = False
    loop = asyncio.get_running_loop()

    tasks: set[asyncio.Task[None]] = set()

    def end() -> None:  # a second signal ends at once
        service.closing.set()
        if service.scheduler.busy:
            say("shutting down; running answers are stopped" + ("" if tasks else f" after {options.grace:g} s"))
        tasks.add(asyncio.ensure_future(_drained(service.scheduler, server, 0 if tasks else options.grace)))

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        try:
            loop.add_signal_handler(number, end)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(end))
    watcher = asyncio.create_task(_end_with(ended, end))
    try:
        await server.serve(sockets=[listening])
    finally:
        watcher.cancel()


async def _drained(scheduler: Scheduler, server: uvicorn.Server, patience: float) -> None:
    await asyncio.to_thread(scheduler.drain, patience)
    server.should_exit = True


async def _end_with(ended: threading.Event, end: Callable[[], None]) -> None:
    while not ended.is_set():
        await asyncio.sleep(0.1)
    end()


class _Server(uvicorn.Server):
    """Leaves signals to this module: uvicorn would raise them again at its end, and the process would look failed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _host_names(options: Options, listening: socket.socket) -> frozenset[str]:
    """Returns the allowed names in Host headers. Others are refused: another site's name may point here."""
    if not is_loopback(options.host):
        return frozenset(name.lower() for name in options.hosts)
    return frozenset({*_LOOPBACK_NAMES, options.host.lower(), *(name.lower() for name in options.hosts)})


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Makes a temporary folder for parked conversations, readable by its owner only, and removes the folder at the end.

    The server locks a file in the folder. The system releases the lock of a killed server, and the next server removes
    that folder. Raises KvedgeError if no folder can be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PARK_PREFIX)))
            handle = os.open(folder / _PARK_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise KvedgeError(
                f"the temporary folder for waiting conversations cannot be created: {error.strerror or error}; name "
                f"a folder with --park DIR"
            ) from None
        stack.callback(os.close, handle)
        with contextlib.suppress(OSError):  # the file system has no locks: other servers then leave the folder alone
            try_lock(handle)
        _remove_left(folder.parent, folder)
        yield folder


def _remove_left(root: Path, own: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            if entry.name.startswith(_PARK_PREFIX) and entry.name != own.name and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Returns whether a folder belongs to this user and to no running server. Without a lock file it may be new."""
    try:
        facts = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(facts.st_mode) or (hasattr(os, "getuid") and facts.st_uid != os.getuid()):
            return False
        handle = os.open(Path(entry.path) / _PARK_LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        try_lock(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def free_memory_share() -> int:
    """Returns the default limit for conversations: half of the bytes available to this process, at least 64 MiB."""
    return max((memory.available_bytes() or 0) // 2, 64 << 20)
