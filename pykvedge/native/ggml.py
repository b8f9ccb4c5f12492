"""Calls ggml by ctypes: devices, features of its CPU code, RPC servers, products with one weight."""

from __future__ import annotations

import ctypes as c
import functools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvedge.errors import DeviceError, LibraryError
from pykvedge.native import libraries, llamacpp
from pykvedge.system import memory

F32, Q8_0, I32, CPU = 0, 8, 26, 0  # ggml_type numbers, and the ggml_backend_dev_type of processors
KINDS = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}
_WEIGHTS = 1  # ggml_backend_buffer_usage
_P, _S, _L = c.c_void_p, c.c_size_t, c.c_int64


class _InitParams(c.Structure):
    _fields_ = [("mem_size", _S), ("mem_buffer", _P), ("no_alloc", c.c_bool)]


class _Feature(c.Structure):
    _fields_ = [("name", c.c_char_p), ("value", c.c_char_p)]


class _Props(c.Structure):
    """ggml_backend_dev_props."""

    _fields_ = [
        ("name", c.c_char_p), ("description", c.c_char_p), ("memory_free", _S), ("memory_total", _S), ("type", c.c_int),
        ("device_id", c.c_char_p), ("caps", c.c_bool * 16),
    ]  # fmt: skip


_TO_FLOAT = c.CFUNCTYPE(None, _P, _P, _L)


class _Traits(c.Structure):
    """ggml_type_traits."""

    _fields_ = [
        ("name", c.c_char_p), ("block", _L), ("interleave", _L), ("size", _S), ("quantised", c.c_bool),
        ("to_float", _TO_FLOAT),
    ]  # fmt: skip


_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_P, [_InitParams]),
    "ggml_free": (None, [_P]),
    "ggml_new_tensor_2d": (_P, [_P, c.c_int, _L, _L]),
    "ggml_new_tensor_3d": (_P, [_P, c.c_int, _L, _L, _L]),
    "ggml_mul_mat": (_P, [_P, _P, _P]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_nbytes": (_S, [_P]),
    "ggml_row_size": (_S, [c.c_int, _L]),
    "ggml_quantize_chunk": (_S, [c.c_int, _P, _P, _L, _L, _L, _P]),
    "ggml_get_type_traits": (c.POINTER(_Traits), [c.c_int]),
    "ggml_backend_dev_count": (_S, []),
    "ggml_backend_dev_get": (_P, [_S]),
    "ggml_backend_dev_by_type": (_P, [c.c_int]),
    "ggml_backend_dev_get_props": (None, [_P, c.POINTER(_Props)]),
    "ggml_backend_dev_backend_reg": (_P, [_P]),
    "ggml_backend_dev_buffer_type": (_P, [_P]),
    "ggml_backend_dev_init": (_P, [_P, c.c_char_p]),
    "ggml_backend_dev_supports_op": (c.c_bool, [_P, _P]),
    "ggml_backend_reg_dev_get": (_P, [_P, _S]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, c.c_char_p]),
    "ggml_backend_reg_by_name": (_P, [c.c_char_p]),
    "ggml_backend_register": (None, [_P]),
    "ggml_set_abort_callback": (_P, [_P]),
    "ggml_backend_free": (None, [_P]),
    "ggml_backend_buft_name": (c.c_char_p, [_P]),
    "ggml_backend_buft_alloc_buffer": (_P, [_P, _S]),
    "ggml_backend_buft_get_alloc_size": (_S, [_P, _P]),
    "ggml_backend_buffer_get_base": (_P, [_P]),
    "ggml_backend_buffer_set_usage": (None, [_P, c.c_int]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_tensor_alloc": (c.c_int, [_P, _P, _P]),
    "ggml_backend_tensor_set": (None, [_P, _P, _S, _S]),
    "ggml_backend_tensor_get": (None, [_P, _P, _S, _S]),
    "ggml_backend_graph_compute": (c.c_int, [_P, _P]),
}


@functools.cache
def _function(name: str) -> Any:
    for handle in _handles():
        if (function := getattr(handle, name, None)) is not None:
            function.restype, function.argtypes = _PROTOTYPES[name]
            return function
    raise LibraryError(f"ggml has no function {name}; {libraries.HOW_TO_BUILD}")


@functools.cache
def _handles() -> list[c.CDLL]:
    llamacpp.start(verbose=False, vision=False)
    place = libraries.require_dir()
    return [c.CDLL(str(place / libraries.file_name(name))) for name in ("ggml-base", "ggml")]


def call(name: str, *arguments: Any) -> Any:
    """Calls ggml_NAME(...). Raises LibraryError if ggml has no such function."""
    return _function(f"ggml_{name}")(*arguments)


@dataclass(frozen=True)
class Device:
    """A device of ggml. address: on the bus, such as "0000:c1:00.0". Two backends may have the same GPU."""

    handle: int
    name: str
    description: str
    kind: str
    total_bytes: int
    free_bytes: int
    address: str = ""


def devices() -> list[Device]:
    """Returns every device that ggml found."""
    found = []
    for i in range(call("backend_dev_count")):
        handle = call("backend_dev_get", i)
        props = _Props()
        call("backend_dev_get_props", handle, c.byref(props))
        name, text, address = ((value or b"").decode() for value in (props.name, props.description, props.device_id))
        kind = KINDS.get(props.type, "other")
        found.append(Device(handle, name, text, kind, props.memory_total, props.memory_free, address))
    return found


_ADD_SERVER = c.CFUNCTYPE(_P, c.c_char_p)
_servers: dict[str, int] = {}  # HOST:PORT of added RPC servers -> first device of the server
_adding = threading.Lock()


def has_gpu() -> bool:
    """Returns whether there is a device with separate memory, also on an RPC server."""
    return any("GPU" in device.kind for device in devices())


_SERVE = c.CFUNCTYPE(None, c.c_char_p, c.c_char_p, _S, _S, c.POINTER(_P))


def _rpc(name: str, prototype: Any) -> Any:
    registry = call("backend_reg_by_name", b"RPC")
    address = call("backend_reg_get_proc_address", registry, f"ggml_backend_rpc_{name}".encode()) if registry else None
    if not address:
        raise LibraryError(f"this build of ggml does not support RPC servers; {libraries.HOW_TO_BUILD}")
    return prototype(address)


def add_server(endpoint: str) -> int:
    """Adds the devices of an RPC server at HOST:PORT to this process, permanently. Returns the first device.

    If no server answers, or a server of another version, ggml ends the process. If the server serves another program,
    ggml waits. Raises DeviceError, LibraryError.
    """
    with _adding:
        if endpoint not in _servers:
            registry = _rpc("add_server", _ADD_SERVER)(endpoint.encode())
            if not registry:
                raise DeviceError(f"the RPC server at {endpoint} lends no device")
            call("backend_register", registry)
            _servers[endpoint] = call("backend_reg_dev_get", registry, 0)
        return _servers[endpoint]


class Connection:
    """Keeps a connection to an RPC server open. Without one, ggml connects again for every call."""

    def __init__(self, endpoint: str) -> None:
        """Waits while the server serves another program. Raises the errors of add_server."""
        self._backend = call("backend_dev_init", add_server(endpoint), None)

    def __del__(self) -> None:
        if hasattr(self, "_backend"):
            call("backend_free", self._backend)

    @classmethod
    def within(cls, seconds: float, endpoint: str) -> Connection | None:
        """Connects, or returns None after so many seconds of waiting. Raises the errors of add_server."""
        made: queue.SimpleQueue[Connection | BaseException] = queue.SimpleQueue()

        def connect() -> None:
            try:
                made.put(cls(endpoint))  # a connection that comes too late is dropped, and closes
            except BaseException as error:
                made.put(error)

        threading.Thread(target=connect, daemon=True).start()
        try:
            found = made.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found


def why_hung_up() -> str:
    """Returns which RPC server of this process is gone, or that a server hung up; for the last message of a program."""
    for endpoint in _servers:
        host, _, port = endpoint.rpartition(":")
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except TimeoutError:  # the server is busy with other clients
            continue
        except OSError:
            return f"the RPC server at {endpoint} closed the connection; start the server again"
    return (
        f"the RPC server at {' or '.join(_servers)} closed the connection, perhaps because it lacks memory; read the "
        "messages of the server"
    )


def serve(endpoint: str, handles: list[int], threads: int) -> None:
    """Lends devices to clients at HOST:PORT. Returns only if it cannot listen."""
    memory.free_at_once(1 << 17)
    _rpc("start_server", _SERVE)(endpoint.encode(), None, threads, len(handles), (_P * len(handles))(*handles))


_ABORT = c.CFUNCTYPE(None, c.c_char_p)


def on_abort(explain: Callable[[str], None]) -> None:
    """Sets a function that is called with the message before ggml aborts. The function should end the process."""
    global _explain_abort
    _explain_abort = _ABORT(lambda message: explain(message.decode("utf-8", "replace")))
    call("set_abort_callback", _explain_abort)


_explain_abort: Any = None


def cpu() -> int:
    """Returns the processor's device. Raises LibraryError if ggml has none."""
    handle = call("backend_dev_by_type", CPU)
    if not handle:
        raise LibraryError(f"ggml has no code for this processor; {libraries.HOW_TO_BUILD}")
    return handle


def _extension(device: int, name: str, prototype: Any) -> Any:
    address = call("backend_reg_get_proc_address", call("backend_dev_backend_reg", device), name.encode())
    return prototype(address) if address else None


def features(device: int) -> list[str]:
    """Returns the features that a device's code was built with, under ggml's names."""
    get = _extension(device, "ggml_backend_get_features", c.CFUNCTYPE(c.POINTER(_Feature), _P))
    out: list[str] = []
    if get is not None:
        found = get(call("backend_dev_backend_reg", device))
        while found[len(out)].name:
            feature = found[len(out)]
            out.append(feature.name.decode() + ("" if feature.value == b"1" else f"={feature.value.decode()}"))
    return out


def buffer_types(device: int) -> list[tuple[str, int]]:
    """Returns the buffer types for weights in the order in which llama.cpp tries them; the plain type is last."""
    get = _extension(device, "ggml_backend_dev_get_extra_bufts", c.CFUNCTYPE(c.POINTER(_P), _P))
    handles: list[int] = []
    if get is not None:
        extra = get(device)
        while extra and extra[len(handles)]:
            handles.append(extra[len(handles)])
    handles.append(call("backend_dev_buffer_type", device))
    return [(call("backend_buft_name", handle).decode(), handle) for handle in handles]


def quantised(kind: int, values: np.ndarray) -> np.ndarray:
    """Quantises float32 rows [n][k] to a ggml type. Returns bytes [n][row]."""
    n, k = values.shape
    out = np.empty((n, call("row_size", kind, k)), np.uint8)
    weights = np.ones(k, np.float32)  # some types need the importance of each value
    call("quantize_chunk", kind, values.ctypes.data, out.ctypes.data, 0, n, k, weights.ctypes.data)
    return out


def widened(kind: int, data: np.ndarray, k: int) -> np.ndarray:
    """Returns rows of a ggml type as float32 [n][k], as ggml converts them."""
    out = np.empty((len(data), k), np.float32)
    traits = call("get_type_traits", kind).contents
    for row, to in zip(data, out, strict=True):
        traits.to_float(row.ctypes.data, to.ctypes.data, k)
    return out


class Weight:
    """A weight [e][n][k] in a buffer type. Computes products with it on the processor or on a device."""

    def __init__(
        self, kind: int, buffer_type: int, shape: tuple[int, int, int], threads: int, device: int | None = None
    ) -> None:
        """shape: e matrices of n rows of k values; e is 1, or the number of experts. device: None: the CPU."""
        self._kind, self._memory, self._shape, self._threads = kind, buffer_type, shape, threads
        self._device = cpu() if device is None else device

    @contextmanager
    def _graph(self, m: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yields (context, weight, input, ids or 0, output) of a product with m rows. Allocates only the weight."""
        e, n, k = self._shape
        context = call("init", _InitParams(1 << 20, None, True))
        weight_memory = 0
        try:
            weight = call("new_tensor_3d", context, self._kind, k, n, e)
            ids = call("new_tensor_2d", context, I32, 1, m) if e > 1 else 0
            given = call("new_tensor_3d", context, F32, k, 1, m) if ids else call("new_tensor_2d", context, F32, k, m)
            made = call("mul_mat_id", context, weight, given, ids) if ids else call("mul_mat", context, weight, given)
            size = call("backend_buft_get_alloc_size", self._memory, weight)
            weight_memory = call("backend_buft_alloc_buffer", self._memory, size)
            if not weight_memory:
                raise LibraryError(f"ggml cannot allocate {size} bytes")
            call("backend_buffer_set_usage", weight_memory, _WEIGHTS)
            call("backend_tensor_alloc", weight_memory, weight, call("backend_buffer_get_base", weight_memory))
            yield context, weight, given, ids, made
        finally:
            if weight_memory:
                call("backend_buffer_free", weight_memory)
            call("free", context)

    @property
    def n_bytes(self) -> int:
        """Returns the bytes of the weight in its buffer type."""
        with self._graph(1) as (_, weight, *_):
            return call("backend_buft_get_alloc_size", self._memory, weight)

    def supported(self, m: int) -> bool:
        """Returns whether llama.cpp would put this weight into the buffer type, for products with m rows."""
        with self._graph(m) as (*_, made):
            return call("backend_dev_supports_op", self._device, made)

    def times(self, data: np.ndarray, rows: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Computes products [m][n] of rows [m][k] with the weight's bytes. experts: [m], the matrix of each row."""
        with self._ready(data, rows, experts) as (compute, made):
            compute()
            out = np.empty((len(rows), self._shape[1]), np.float32)
            call("backend_tensor_get", made, out.ctypes.data, 0, out.nbytes)
            return out

    def bytes_per_second(self, seconds: float) -> float:
        """Measures how fast products with one row read a weight of zeros, for so many seconds. Raises LibraryError."""
        n_bytes = self.n_bytes
        with self._ready(np.zeros(n_bytes, np.uint8), np.zeros((1, self._shape[2])), np.zeros(1)) as (compute, _):
            compute()  # the first product includes preparations
            started, n = time.perf_counter(), 0
            while time.perf_counter() - started < seconds or n < 2:
                compute()
                n += 1
            return n * n_bytes / (time.perf_counter() - started)

    @contextmanager
    def _ready(
        self, data: np.ndarray, rows: np.ndarray, experts: np.ndarray
    ) -> Iterator[tuple[Callable[[], None], int]]:
        """Yields a function that computes the products, and the output tensor."""
        with self._graph(len(rows)) as (context, weight, given, ids, made):
            plain = call("backend_dev_buffer_type", self._device)
            others = call("backend_alloc_ctx_tensors_from_buft", context, plain)
            backend = call("backend_dev_init", self._device, None)

            def compute() -> None:
                if call("backend_graph_compute", backend, graph) != 0:
                    raise LibraryError("ggml cannot compute the product")

            try:
                _put(weight, data)
                _put(given, np.ascontiguousarray(rows, np.float32))
                if ids:
                    _put(ids, np.ascontiguousarray(experts, np.int32))
                graph = call("new_graph", context)
                call("build_forward_expand", graph, made)
                set_threads = _extension(self._device, "ggml_backend_set_n_threads", c.CFUNCTYPE(None, _P, c.c_int))
                if set_threads is not None:
                    set_threads(backend, self._threads)
                yield compute, made
            finally:
                call("backend_free", backend)
                call("backend_buffer_free", others)


def _put(tensor: int, data: np.ndarray) -> None:
    call("backend_tensor_set", tensor, data.ctypes.data, 0, data.nbytes)
