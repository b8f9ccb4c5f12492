"""Turns a name into files: asks the hub for its files, chooses some, and downloads the choice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pykvedge.errors import CancelledError, HubError, UnknownNameError, UnreachableError
from pykvedge.models.gguf import Header, joined
from pykvedge.models.hub.cached import find_cached
from pykvedge.models.hub.fetching import check_room, fetch, is_there
from pykvedge.models.hub.folders import Folder, Pair
from pykvedge.models.hub.names import Choice, HubRequest, Name
from pykvedge.models.hub.remote import Hub, Listing, RemoteFile, offline
from pykvedge.models.modelfile import check_mmproj, check_model
from pykvedge.system.memory import readable


def resolve(
    name: str,
    *,
    file: str = "",
    mmproj: str = "",
    offline: bool = False,
    progress: Callable[[str, float], None] = lambda what, share: None,
    warn: Callable[[str], None] = lambda line: None,
    cancel: threading.Event | None = None,
) -> Pair:
    """Finds the files of user/repo[:quant] in the cache, or downloads them into it.

    file, mmproj: paths in the repository instead of the chosen ones; mmproj "none": without an image encoder.
    offline: only the cache is asked. progress(what, share done in 0..1) is called during the work. warn(line) is called
    if the cache answers because the hub does not. Setting `cancel` ends the work.
    Raises UsageError for a wrong name or if huggingface_hub is missing, UnknownNameError for a missing quantisation or
    file, HubError, ModelError for files that do not fit together, CancelledError.
    """
    return _Search(HubRequest(Name.of(name), file, mmproj), offline, progress, warn, cancel).pair()


def headers(
    name: str,
    *,
    file: str = "",
    mmproj: str = "",
    offline: bool = False,
    progress: Callable[[str, float], None] = lambda what, share: None,
    warn: Callable[[str], None] = lambda line: None,
) -> tuple[Header, Header | None]:
    """Reads the headers of the files that `resolve` would return, and downloads nothing else.

    The arguments and errors are those of `resolve`.
    """
    return _Search(HubRequest(Name.of(name), file, mmproj), offline, progress, warn, None).headers()


@dataclass(frozen=True)
class _Search:
    """A search for the files of a model, in the hub and in the cache."""

    request: HubRequest
    offline: bool
    progress: Callable[[str, float], None]
    warn: Callable[[str], None]
    cancel: threading.Event | None

    @property
    def repo(self) -> str:
        return self.request.name.repo

    def pair(self) -> Pair:
        asked = self._ask()
        if asked is None:
            return self._cached()
        hub, listing = asked
        choice, folder = self.request.choice(list(listing.files)), Folder.of(self.repo)
        files = [listing.files[path] for path in choice.files]
        missing = [file for file in files if not is_there(folder, listing.commit, file)]
        if missing:
            check_room(folder, missing, f"{self.repo}/{choice.model}")
            self._headers(hub, listing, choice)
            self._fetch(hub, folder, listing.commit, missing)
        places = {file.path: folder.link(listing.commit, file.path, file.checksum) for file in files}
        folder.note_main(listing.commit)
        return folder.pair(choice, places)

    def headers(self) -> tuple[Header, Header | None]:
        if asked := self._ask():
            hub, listing = asked
            return self._headers(hub, listing, self.request.choice(list(listing.files)))
        model, mmproj = self._cached()
        header = check_model(model)
        return header, check_mmproj(mmproj, header) if mmproj else None

    def _ask(self) -> tuple[Hub, Listing] | None:
        """Returns the hub and its files, or None if the cache must be used: offline, or no answer."""
        if self.offline or offline():
            return None
        self._look()
        self.progress(f"looking up {self.repo}", 0.0)
        hub = Hub()
        try:
            return hub, hub.listing(self.repo)
        except HubError as error:
            cached = None
            with suppress(HubError, UnknownNameError):
                cached = find_cached(self.request)
            if cached is None:
                raise
            if not isinstance(error, UnreachableError):
                raise HubError(f"{error}; use --offline, because the model is in the cache") from None
            self.warn(f"{error}; using the model in the cache")
            return None

    def _cached(self) -> Pair:
        found = find_cached(self.request)
        if found is None:
            raise HubError(f"{self.request.name} is not in the cache; download the model once without --offline")
        return found

    def _headers(self, hub: Hub, listing: Listing, choice: Choice) -> tuple[Header, Header | None]:
        """Downloads the headers of the model and its encoder, and checks whether they fit together."""

        def header(path: str) -> Header:
            self._look()
            self.progress(f"reading the header of {path}", 0.0)
            return hub.header(self.repo, listing.commit, listing.files[path])

        model = check_model(joined([header(path) for path in choice.parts]))
        return model, check_mmproj(header(choice.mmproj), model) if choice.mmproj else None

    def _fetch(self, hub: Hub, folder: Folder, commit: str, files: list[RemoteFile]) -> None:
        total, before = max(sum(file.size for file in files), 1), 0
        for file in files:
            name, size = file.path.rpartition("/")[2], readable(file.size)

            def look(n: int, name: str = name, size: str = size, before: int = before) -> None:
                self._look()
                self.progress(f"downloading {name}: {readable(n)} of {size}", min((before + n) / total, 1.0))

            look(0)
            fetch(hub, folder, commit, file, look)
            before += file.size

    def _look(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError
