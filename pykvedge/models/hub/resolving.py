"""The way from a name to files: what the hub has is listed, chosen, checked by its headers, and fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pykvedge.errors import CancelledError, HubError, UnknownNameError, UnreachableError
from pykvedge.models.gguf import Header
from pykvedge.models.hub.cached import find_cached
from pykvedge.models.hub.fetching import check_room, fetch, is_there
from pykvedge.models.hub.folders import Folder
from pykvedge.models.hub.names import Choice, Name, Wanted
from pykvedge.models.hub.prechecks import check_vocabulary, read_start
from pykvedge.models.hub.remote import Hub, Listing, RemoteFile, offline
from pykvedge.models.modelfile import check_mmproj, check_model, usable_mmproj, usable_model
from pykvedge.system.memory import readable

Progress = Callable[[str, float], None]  # (what, share done in 0..1)


def silent(what: str, share: float) -> None:
    """Stands for progress that nobody looks at."""


def quiet(line: str) -> None:
    """Stands for warnings that nobody reads."""


class Pair(NamedTuple):
    """The files of a model: Session(*pair) or load(*pair) takes them."""

    model: Path
    mmproj: Path | None


def resolve(
    name: str,
    *,
    file: str = "",
    mmproj: str = "",
    offline: bool = False,
    progress: Progress = silent,
    warn: Callable[[str], None] = quiet,
    cancel: threading.Event | None = None,
) -> Pair:
    """Finds the files of user/repo[:quant] in the cache, or fetches them into it; mmproj is None where there is none.

    file, mmproj: paths in the repository instead of what the rules choose; mmproj "none": without an image encoder.
    offline: only what is in the cache. progress(what, share done) is called meanwhile, warn(line) where the hub does
    not answer and the cache does instead; setting `cancel` ends the work.
    Raises UsageError for a name that is none and where huggingface_hub is missing, UnknownNameError for a quantisation
    or file that is not there, HubError, ModelError for files that do not belong together, CancelledError.
    """
    return _Search(Wanted(Name.of(name), file, mmproj), offline, progress, warn, cancel).pair()


def headers(
    name: str,
    *,
    file: str = "",
    mmproj: str = "",
    offline: bool = False,
    progress: Progress = silent,
    warn: Callable[[str], None] = quiet,
) -> tuple[Header, Header | None]:
    """Reads the headers of the files that `resolve` would return, and fetches no more of them than that.

    Raises what `resolve` raises.
    """
    return _Search(Wanted(Name.of(name), file, mmproj), offline, progress, warn, None).headers()


@dataclass
class _Search:
    wanted: Wanted
    offline: bool
    progress: Progress
    warn: Callable[[str], None]
    cancel: threading.Event | None

    @property
    def repo(self) -> str:
        return self.wanted.name.repo

    def pair(self) -> Pair:
        hub, listing = self._ask()
        if hub is None or listing is None:
            return self._cached()
        choice = self.wanted.choice(list(listing.files))
        folder = Folder.of(self.repo)
        missing = [f for f in _files(choice, listing) if not self._has(folder, listing.commit, f)]
        if missing:
            check_room(folder, missing, f"{self.repo}/{choice.model}")
            self._headers(hub, listing, choice)
            for one in missing:
                hub.confirm(self.repo, listing.commit, one)
            self._fetch(hub, folder, listing.commit, missing)
        places = {f.path: folder.link(listing.commit, f.path, f.checksum) for f in _files(choice, listing)}
        folder.note_main(listing.commit)
        checked = {path: folder.checked(place) for path, place in places.items()}
        return Pair(checked[choice.model], checked[choice.mmproj] if choice.mmproj else None)

    def headers(self) -> tuple[Header, Header | None]:
        hub, listing = self._ask()
        if hub is None or listing is None:
            model, mmproj = self._cached()
            header = check_model(model)
            return header, check_mmproj(mmproj, header) if mmproj else None
        return self._headers(hub, listing, self.wanted.choice(list(listing.files)))

    def _ask(self) -> tuple[Hub | None, Listing | None]:
        """Asks the hub what there is. Returns nothing where it must not be, or is silent and the cache will do."""
        if self.offline or offline():
            return None, None
        self._look()
        self.progress(f"asking for {self.repo}", 0.0)
        hub = Hub()
        try:
            return hub, hub.listing(self.repo)
        except UnreachableError as error:
            if not self._is_cached():
                raise
            self.warn(f"{error}; going on with what is in the cache")
            return None, None
        except HubError as error:
            if not self._is_cached():
                raise
            raise HubError(f"{error}; it is in the cache, where --offline finds it") from None

    def _is_cached(self) -> bool:
        with suppress(HubError, UnknownNameError):
            return find_cached(self.wanted) is not None
        return False

    def _cached(self) -> Pair:
        found = find_cached(self.wanted)
        if found is None:
            raise HubError(f"{self.wanted.name} is not in the cache; fetch it once without --offline")
        return Pair(*found)

    def _has(self, folder: Folder, commit: str, file: RemoteFile) -> bool:
        place = folder.place(commit, file.path)
        named = place.is_file() and place.stat().st_size == file.size and folder.holds(place)
        return named or is_there(folder, file)

    def _headers(self, hub: Hub, listing: Listing, choice: Choice) -> tuple[Header, Header | None]:
        """Reads and checks the headers, of a file that is in the cache there."""
        header, start = self._start(hub, listing, choice.model)
        usable_model(header)
        projector = usable_mmproj(self._start(hub, listing, choice.mmproj)[0], header) if choice.mmproj else None
        check_vocabulary(header, start)
        return header, projector

    def _start(self, hub: Hub, listing: Listing, path: str) -> tuple[Header, bytes]:
        self._look()
        self.progress(f"reading the header of {path}", 0.0)
        file, folder = listing.files[path], Folder.of(self.repo)
        name = Path(f"{self.repo}/{path}")
        blob = folder.blob(file.checksum)
        if not is_there(folder, file):
            return read_start(name, file.size, lambda a, b: hub.start(self.repo, listing.commit, file, a, b))

        def from_disk(begin: int, end: int) -> bytes:
            with blob.open("rb") as content:
                content.seek(begin)
                return content.read(end - begin)

        return read_start(name, file.size, from_disk)

    def _fetch(self, hub: Hub, folder: Folder, commit: str, files: list[RemoteFile]) -> None:
        total, before = sum(file.size for file in files), 0
        for file in files:
            short = file.path.rpartition("/")[2]

            def look(n: int, file: RemoteFile = file, short: str = short, before: int = before) -> None:
                self._look()
                what = f"fetching {short}: {readable(n)} of {readable(file.size)}"
                self.progress(what, min((before + n) / max(total, 1), 1.0))

            look(0)
            fetch(hub, folder, commit, file, look)
            before += file.size

    def _look(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError


def _files(choice: Choice, listing: Listing) -> list[RemoteFile]:
    return [listing.files[path] for path in choice.files]
