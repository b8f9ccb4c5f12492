"""Holds a loaded model and its image encoder, for any number of conversations."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykvedge.caches.encoded import Encoded
from pykvedge.caches.folder import CacheFolder
from pykvedge.errors import StateError, UsageError
from pykvedge.models.encoder import Encoder
from pykvedge.models.gguf import read_header
from pykvedge.models.imagetokens import token_limits
from pykvedge.models.model import Model, Progress, silent
from pykvedge.models.packaged import PACKAGED
from pykvedge.native import llamacpp
from pykvedge.runtime.opening import Openings
from pykvedge.runtime.sessionfile import fingerprint
from pykvedge.runtime.settings import LoadSettings, Settings
from pykvedge.runtime.thread_chooser import ThreadChooser
from pykvedge.system import dropped, signals
from pykvedge.system.guard import Closing, Single, Stop
from pykvedge.system.version import package_version

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Caches:
    """Caches shared by all sessions of a loaded model. folder: shared with later runs and other programs; or None."""

    images: Encoded | None
    openings: Openings | None  # None: openings are not kept
    folder: CacheFolder | None

    @classmethod
    def of(cls, encoder: Encoder | None, settings: Settings) -> Caches:
        folder = CacheFolder(settings.cache, settings.cache_size) if settings.cache is not None else None
        openings = Openings(settings.prompt_cache, folder) if settings.prompt_cache or folder else None
        if encoder is None:
            return cls(None, openings, folder)
        where = "device" if encoder.on_device else "cpu"
        # embeddings depend on the encoder file, the device, and the llama.cpp version that prepares images
        facts = f"{encoder.limits} {where} {package_version()}"
        name = f"{fingerprint(encoder.header)} {facts}" if folder is not None else ""
        return cls(Encoded(encoder.width, settings.image_cache, folder, name), openings, folder)

    def notes(self) -> list[str]:
        """Returns notes about problems of the cache folder since the last call: one line per kind of problem."""
        return self.folder.notes() if self.folder is not None else []


@dataclass(frozen=True)
class Loan:
    """What a session borrows from a loaded model. The session frees its context, then calls give_back."""

    model: Model
    encoder: Encoder | None
    caches: Caches
    threads: int  # for a session whose settings name no number
    thread_chooser: ThreadChooser  # shared: learns the best number of threads from all sessions
    give_back: Callable[[], None]
    again: Callable[[], Loan]  # makes another loan for a fork, also after LoadedModel.close


class LoadedModel(Closing, Single):
    """A loaded model, made by `load`. Close the model when done, or use a with statement."""

    instead = "pass the model to sessions in several threads instead"

    def __init__(self, model: Model, encoder: Encoder | None, caches: Caches, threads: int) -> None:
        self._model, self._encoder, self._caches = model, encoder, caches
        self.threads = threads
        self._thread_chooser = ThreadChooser(threads, llamacpp.default_threads())
        self._lock = threading.Lock()
        self._loans: set[object] = set()
        self._closed = False
        self._dropped = dropped.add(self, functools.partial(_free, model, encoder, caches))

    @property
    def path(self) -> Path:
        """Returns the file of the language model."""
        return self._model.path

    @property
    def sees_images(self) -> bool:
        """Returns whether an image encoder is loaded."""
        return self._encoder is not None

    @property
    def open_sessions(self) -> int:
        """Returns the number of open sessions of this model."""
        return len(self._loans)

    @property
    def in_memory(self) -> bool:
        """Returns whether the weights are in memory. False once the model and all of its sessions are closed."""
        return bool(self._model.handle)

    def close(self) -> None:
        """Allows no new sessions. Frees the weights when the last open session closes.

        A second call does nothing. Any thread may call this.
        """
        with signals.held(), self._lock:
            self._closed = True
            self._free_if_unused()

    def lend(self) -> Loan:
        """Lends the weights to a session until the session gives them back. Raises StateError after close."""
        with self._lock:
            if self._closed:
                raise StateError(f"{self.path.name} is closed; load it again")
        return self._lend()

    def _lend(self) -> Loan:
        loan = object()
        with self._lock:
            self._loans.add(loan)
        back = functools.partial(self._returned, loan)
        return Loan(self._model, self._encoder, self._caches, self.threads, self._thread_chooser, back, self._lend)

    def _returned(self, loan: object) -> None:
        with signals.held(), self._lock:
            self._loans.discard(loan)
            self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._closed and not self._loans:
            _free(self._model, self._encoder, self._caches)
            dropped.remove(self._dropped)


def _free(model: Model, encoder: Encoder | None, caches: Caches) -> None:
    if caches.openings is not None:
        caches.openings.finish()
    if caches.images is not None:
        caches.images.memory.clear()
    if encoder is not None:
        encoder.close()
    model.close()


@signals.held()
def load(
    model: str | os.PathLike[str] = PACKAGED,
    mmproj: str | os.PathLike[str] | None = None,
    *,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
    **given: Unpack[LoadSettings],
) -> LoadedModel:
    """Loads a model for several sessions, with an image encoder if `mmproj` is given; by default the packaged model.

        with pykvedge.load("model.gguf", "mmproj.gguf") as model:
            session = pykvedge.Session(model, plan=pykvedge.plan("kvedge", 0.2))

    progress(what, share done) is called during the loading; setting `cancel` stops the loading. Settings: threads: of
    the image encoder, and of sessions without a number; 0: the physical cores. gpu_layers: layers on devices, -1: all,
    "auto": as many as fit with a whole context. device: "auto", "none", or names of devices. rpc: servers with more
    devices, as in "HOST:PORT,HOST:PORT". verbose: llama.cpp's log on stderr. image_cache: bytes in memory for encoded
    images. prompt_cache: bytes in memory for beginnings of conversations, which later conversations reuse
    (runtime/opening.py). 0: no such cache. cache: a folder that keeps both for later runs; cache_size: its limit in
    bytes. image_min_tokens, image_max_tokens: limits per image, if the encoder takes images of any size; 0: the
    encoder's limits. Raises ModelError, LibraryError, DeviceError, OutOfMemoryError, CancelledError, and UsageError,
    also for settings that belong to a session."""
    settings = Settings.of({**given})
    if others := [name for name in given if name not in LoadSettings.__annotations__]:
        raise UsageError(
            f"{others[0]} is a setting of a session, not of a model; pass it to pykvedge.Session(model, "
            f"{others[0]}=...)"
        )
    mmproj = with_encoder(model, mmproj)
    return _load(model, mmproj, settings, signals.lifting(progress), Stop(cancel))


def _load(
    model: str | os.PathLike[str],
    mmproj: str | os.PathLike[str] | None,
    settings: Settings,
    progress: Progress,
    cancel: threading.Event | None,
) -> LoadedModel:
    _check_image_limits(mmproj, settings)
    threads, verbose = settings.threads or llamacpp.default_threads(), settings.verbose
    weights = Model(path_of(model), settings.offload, progress, cancel, verbose)
    encoder = None
    with ExitStack() as undo:
        undo.callback(weights.close)
        if mmproj is not None:
            progress("loading the image encoder", 1.0)
            path, on_device = path_of(mmproj, "the mmproj"), not settings.offload.cpu_only
            encoder = Encoder(path, weights, threads, on_device, verbose, settings.image_limits)
            undo.callback(encoder.close)
        caches = Caches.of(encoder, settings)
        undo.pop_all()
    return LoadedModel(weights, encoder, caches, threads)


def _check_image_limits(mmproj: str | os.PathLike[str] | None, settings: Settings) -> None:
    """Raises UsageError for limits that the encoder does not take, before the weights are read."""
    if not any(settings.image_limits):
        return
    if mmproj is None:
        raise UsageError("image_min_tokens and image_max_tokens need an image encoder; give the mmproj file")
    header = read_header(path_of(mmproj, "the mmproj"))
    if header.architecture == "clip":  # the loading reports other files
        token_limits(header, *settings.image_limits)


def borrow(
    model: str | os.PathLike[str] | LoadedModel | Loan,
    mmproj: str | os.PathLike[str] | None,
    settings: Settings,
    progress: Progress,
    cancel: threading.Event | None,
) -> Loan:
    """Borrows a loaded model, loads a model for one loan, or renews a loan.

    Raises the errors of `load`; UsageError for settings that belong to the loading, StateError for a closed model.
    """
    if isinstance(model, Loan):
        return model.again()
    if isinstance(model, LoadedModel):
        if mmproj is not None:
            raise UsageError("a loaded model takes no mmproj; give the mmproj to pykvedge.load(model, mmproj)")
        if changed := settings.changed_loading:
            raise UsageError(f"{changed[0]} cannot change for a loaded model; pass {changed[0]} to pykvedge.load")
        return model.lend()
    with _load(model, mmproj, settings, progress, cancel) as loaded:
        return loaded.lend()


def with_encoder(model: Any, mmproj: Any) -> Any:
    """Returns the mmproj of a model; for the packaged model its packaged mmproj. Raises UsageError."""
    if model is not PACKAGED:
        return mmproj
    if mmproj is not None or not PACKAGED.is_file():
        missing = f"the packaged model {PACKAGED} is missing; name a model"
        what = missing if mmproj is None else "an mmproj needs its model; name both files"
        raise UsageError(what)
    return PACKAGED.with_name("demo-mmproj.gguf")


def path_of(model: Any, what: str = "the model") -> Path:
    """Returns the file of a model, loaded or not. Raises UsageError if `model` is no path."""
    if isinstance(model, LoadedModel):
        return model.path
    if isinstance(model, Loan):
        return model.model.path
    if not isinstance(model, (str, os.PathLike)) or not isinstance(name := os.fspath(model), str):
        raise UsageError(f"{what} must be the path of a GGUF file, not {model!r:.40}")
    if "\0" in name or not name:
        raise UsageError(f"the path of {what} is empty or contains a zero byte")
    return Path(name)
