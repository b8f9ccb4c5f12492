"""A loaded model serves any number of conversations, with its image encoder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykvedge.errors import StateError, UsageError
from pykvedge.models.encoder import Encoder
from pykvedge.models.model import Model, Progress, silent
from pykvedge.models.offload import Offload
from pykvedge.native import llamacpp
from pykvedge.runtime.settings import LoadSettings, Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Loan:
    """A session works with this until it calls give_back: once, and after it has freed its context."""

    model: Model
    encoder: Encoder | None
    threads: int  # of a session that names no number
    give_back: Callable[[], None]


class LoadedModel:
    """`load` returns this. Close it when done, or use it in a with statement."""

    def __init__(self, model: Model, encoder: Encoder | None, threads: int) -> None:
        self._model, self._encoder = model, encoder
        self.threads = threads
        self._lock = threading.Lock()
        self._n_open, self._closed = 0, False

    @property
    def path(self) -> Path:
        """The language model was loaded from this file."""
        return self._model.path

    @property
    def sees_images(self) -> bool:
        """Tells whether an image encoder was loaded."""
        return self._encoder is not None

    @property
    def open_sessions(self) -> int:
        """Counts the sessions made from it that are not closed yet."""
        return self._n_open

    @property
    def in_memory(self) -> bool:
        """This is false once it is closed and all of its sessions are: the weights are freed."""
        return bool(self._model.handle)

    def close(self) -> None:
        """No more sessions can be made from it. The weights are freed when the last one that is open is closed.

        Does nothing the second time. May be called from any thread.
        """
        with self._lock:
            self._closed = True
            self._free_if_unused()

    def lend(self) -> Loan:
        """Lends the weights to a session; they stay until it gives them back. Raises StateError after close."""
        with self._lock:
            if self._closed:
                raise StateError(f"{self.path.name} is closed; load it again")
            self._n_open += 1
        return Loan(self._model, self._encoder, self.threads, self._returned)

    def _returned(self) -> None:
        with self._lock:
            self._n_open -= 1
            self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._closed and self._n_open == 0:
            if self._encoder is not None:
                self._encoder.close()
            self._model.close()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    model: str | os.PathLike[str],
    mmproj: str | os.PathLike[str] | None = None,
    *,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
    **given: Unpack[LoadSettings],
) -> LoadedModel:
    """Loads a model, and the image encoder if one is given, for several sessions.

        with pykvedge.load("model.gguf", "mmproj.gguf") as model:
            session = pykvedge.Session(model, plan=pykvedge.plan("lookm", 0.2))

    progress(what, share done) is called meanwhile; setting `cancel` stops it. Settings: threads, of the image
    encoder, and of sessions that name none; 0: the physical cores. gpu_layers, on devices: a number, -1 for all,
    "auto" for as many as fit with a whole context. device: "auto", "none", or names of devices. rpc: servers whose
    devices are added, as in "HOST:PORT,HOST:PORT". verbose: llama.cpp's log on stderr. Raises ModelError,
    LibraryError, DeviceError, OutOfMemoryError, UsageError, CancelledError.
    """
    return _load(model, mmproj, Settings(**given), progress, cancel)


def _load(
    model: str | os.PathLike[str],
    mmproj: str | os.PathLike[str] | None,
    settings: Settings,
    progress: Progress,
    cancel: threading.Event | None,
) -> LoadedModel:
    threads, verbose = settings.threads or llamacpp.default_threads(), settings.verbose
    weights = Model(path_of(model), settings.offload, progress, cancel, verbose)
    try:
        encoder = None
        if mmproj is not None:
            progress("loading the image encoder", 1.0)
            encoder = Encoder(path_of(mmproj, "the mmproj"), weights, threads, not settings.offload.off, verbose)
    except BaseException:
        weights.close()
        raise
    return LoadedModel(weights, encoder, threads)


def borrow(
    model: str | os.PathLike[str] | LoadedModel,
    mmproj: str | os.PathLike[str] | None,
    settings: Settings,
    progress: Progress,
    cancel: threading.Event | None,
) -> Loan:
    """Borrows a loaded model, or one that is loaded for this and freed when the loan is given back.

    Raises what load raises; UsageError for settings that belong to the loading, StateError for a model that is closed.
    """
    if isinstance(model, LoadedModel):
        if mmproj is not None:
            raise UsageError("the image encoder belongs to the loaded model: pykvedge.load(model, mmproj)")
        if settings.offload != Offload() or settings.verbose:
            raise UsageError(
                "gpu_layers, device, rpc and verbose are settings of pykvedge.load when the model is loaded before"
            )
        return model.lend()
    with _load(model, mmproj, settings, progress, cancel) as loaded:
        return loaded.lend()


def path_of(model: Any, what: str = "the model") -> Path:
    """Returns the file of a model, loaded or not. Raises UsageError for what is no path."""
    if isinstance(model, LoadedModel):
        return model.path
    if not isinstance(model, (str, os.PathLike)) or not isinstance(name := os.fspath(model), str):
        raise UsageError(f"{what} must be the path of a GGUF file, not {model!r:.40}")
    if "\0" in name or not name:
        raise UsageError(f"the path of {what} is empty or holds a zero byte")
    return Path(name)
