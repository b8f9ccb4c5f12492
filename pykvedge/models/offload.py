"""The devices of a model's layers: GPUs, and other machines through llama.cpp's RPC servers."""

from __future__ import annotations

import ctypes
import socket
import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from pykvedge.errors import DeviceError, KvedgeWarning, ModelError, UsageError

if TYPE_CHECKING:
    from pykvedge.models.gguf import Header
    from pykvedge.models.placement import ConversationSize, Placement
    from pykvedge.native import ggml
    from pykvedge.native.ggml import Device

AUTO, NONE = "auto", "none"
CONNECT_S = 5.0  # seconds until a server counts as absent or busy with another program
_HELLO = bytes([14]) + (24).to_bytes(8, "little") + bytes(24)  # the client's first message in ggml's RPC protocol
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Offload:
    """The placement of layers that the user asks for. Raises UsageError for options that contradict each other."""

    gpu_layers: int | str | None = None  # layers on devices; -1: all, "auto": as many as fit, None: llama.cpp's default
    device: str = AUTO  # "auto": all devices; "none"; or names, as in "CUDA0,RPC0"
    rpc: str = ""  # servers, as in "HOST:PORT,HOST:PORT"; their devices join this machine's devices
    conversation: ConversationSize | None = field(default=None, compare=False)  # gpu_layers "auto" leaves room for it

    def __post_init__(self) -> None:
        if isinstance(self.gpu_layers, str) and self.gpu_layers != AUTO:
            raise UsageError(f"--gpu-layers must be a number, -1 for all, or auto, not '{self.gpu_layers:.40}'")
        if not self.names and self.device not in (AUTO, NONE):
            raise UsageError("--device must be auto, none, or names of devices, for example CUDA0,RPC0")
        if self.device == NONE and (self.rpc or self.gpu_layers):
            raise UsageError("--device none excludes --rpc and --gpu-layers; omit one or the other")
        for endpoint in self.servers:
            _address(endpoint)

    @property
    def servers(self) -> list[str]:
        """The addresses of the servers."""
        return _words(self.rpc)

    @property
    def names(self) -> list[str]:
        """The devices that the user named; [] for "auto" and "none"."""
        return [] if self.device in (AUTO, NONE) else _words(self.device)

    @property
    def cpu_only(self) -> bool:
        """Whether everything stays on the CPU."""
        return self.device == NONE or self.gpu_layers == 0

    @property
    def cpu_through_graph(self) -> bool:
        """Whether the CPU runs its layers by the graph of a device, for comparison with a device."""
        return self.names == ["CPU"]

    def devices(self) -> list[Device]:
        """Returns the devices for layers, in llama.cpp's order: servers, then GPUs, or else an integrated GPU.

        Raises DeviceError for a server that does not answer, UsageError for an unknown device.
        """
        _held = self._connect()
        return self._chosen()

    def _connect(self) -> list[ggml.Connection]:
        from pykvedge.native import ggml

        held = []
        for endpoint in self.servers:
            _reach(endpoint)
            connection = ggml.Connection.within(CONNECT_S, endpoint)
            if connection is None:  # another program connected first
                raise DeviceError(_busy(endpoint))
            held.append(connection)
        return held

    def _chosen(self) -> list[Device]:
        from pykvedge.native import backends, ggml

        if self.cpu_only or self.cpu_through_graph:
            return []
        if self.names:
            return [_device(name) for name in self.names]
        there = [device for device in ggml.devices() if "GPU" in device.kind]
        servers = [device for device in there if device.name.startswith("RPC")]
        own: list[Device] = []
        for device in there:
            twin = device.address and any(device.address == other.address for other in own)
            own += [device] * (device.kind == "GPU" and device not in servers and not twin)
        found = servers + (own or [device for device in there if device.kind == "integrated GPU"][:1])
        if not found and isinstance(self.gpu_layers, int):
            why = backends.unused() or "; `kvedge doctor` gives the reason"
            warnings.warn(f"no GPU was found for {self.gpu_layers} gpu_layers, so the processor computes all "
            f"layers{why}",
                          KvedgeWarning, stacklevel=2)  # fmt: skip
        return found

    def apply(self, params: Any, header: Header) -> Any:
        """Sets llama_model_params for a model. Returns objects that must live as long as the parameters.

        Raises what `devices` raises.
        """
        held, chosen = self._connect(), self._chosen()  # the weights hold the connection later
        if isinstance(self.gpu_layers, str):
            params.n_gpu_layers = self._most(header, chosen)
        elif self.gpu_layers is not None:
            params.n_gpu_layers = self.gpu_layers
        if self.cpu_only or self.cpu_through_graph:
            params.n_gpu_layers = 0
        if self.device == AUTO and not isinstance(self.gpu_layers, str):
            return held
        array = (ctypes.c_void_p * (len(chosen) + 1))(*(device.handle for device in chosen), None)
        params.devices = ctypes.cast(array, ctypes.c_void_p)
        return held, array

    def _most(self, header: Header, devices: list[Device]) -> int:
        try:
            return self._placed(header, self.conversation, devices).gpu_layers if self.conversation is not None else 0
        except ModelError:  # the file lacks metadata for a plan
            return 0

    def placement(self, header: Header, size: ConversationSize) -> Placement:
        """Computes the memory of a model's layers on the devices. Raises what `devices` raises, and ModelError."""
        return self._placed(header, size, self.devices())

    def _placed(self, header: Header, size: ConversationSize, devices: list[Device]) -> Placement:
        from pykvedge.models import placement
        from pykvedge.models.shape import ModelShape

        shape = ModelShape.of(header)
        if isinstance(self.gpu_layers, str):
            return placement.largest(header, shape, devices, size)
        return placement.place(header, shape, devices, size, -1 if self.gpu_layers is None else self.gpu_layers)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _device(name: str) -> Device:
    from pykvedge.native import backends, ggml

    found = {device.name: device for device in ggml.devices()}
    if name not in found:
        known = ", ".join(found) or "none"
        raise UsageError(f"the device {name} does not exist; this machine has {known}{backends.unused()}")
    if found[name].kind == "CPU":
        raise UsageError("--device CPU is not allowed; use --device none to compute on the CPU only")
    return found[name]


def _address(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--rpc must be HOST:PORT, for example 192.168.0.7:50052, not '{endpoint}'")
    return host, int(port)


def _reach(endpoint: str) -> None:
    """Raises DeviceError if the server is unusable. ggml would end the process, or wait without a limit."""
    with _one_at_a_time:  # one thread at a time: a server that answers one thread lets another thread wait
        if _is_client_of(endpoint):
            return
        try:
            with socket.create_connection(_address(endpoint), CONNECT_S) as server:
                server.sendall(_HELLO)
                answer = server.recv(64)
        except OSError as error:
            if isinstance(error, TimeoutError) and _is_client_of(endpoint):  # another thread has connected meanwhile
                return
            raise DeviceError(_unreachable(endpoint, error)) from None
        if not answer:
            raise DeviceError(
                f"the server at {endpoint} is not an RPC server of this version of kvedge; start "
                f"kvedge rpc-server of this version"
            )


def _busy(endpoint: str) -> str:
    return (
        f"no RPC server answers at {endpoint} within {CONNECT_S:.0f} s; an RPC server serves one program at a time, "
        f"so try again when the other program has ended"
    )


def _unreachable(endpoint: str, error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return _busy(endpoint)
    why = error.strerror or str(error) or "no answer"
    return (
        f"no RPC server answers at {endpoint}: {why}; start a server on that machine with `kvedge rpc-server "
        f"--host ADDRESS`"
    )


def _is_client_of(endpoint: str) -> bool:
    """Returns whether this process has a connection to the server; its devices then belong to this process."""
    host, port = _address(endpoint)
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections  # the name before psutil 6
    try:
        there = socket.gethostbyname(host), port
        return any(c.raddr == there and c.status == psutil.CONN_ESTABLISHED for c in connections("tcp4"))
    except (OSError, psutil.Error):
        return False
