"""Asks a hub of models, through huggingface_hub, for lists of files and for bytes of files.

hf_hub_download is not used: it starts over after a kill, and compares no checksum. The endpoint is MODEL_ENDPOINT (as
in llama.cpp), else HF_ENDPOINT, else huggingface_hub's default. huggingface_hub also finds the token (HF_TOKEN).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from pykvedge.errors import HubError, ModelError, UnreachableError, UsageError, one_line
from pykvedge.models.gguf import Header, header_of
from pykvedge.models.hub.folders import is_checksum, is_commit
from pykvedge.system.version import package_version

_TIMEOUT_S = 30.0
_BEGINNINGS = tuple(1 << bits for bits in range(17, 27, 3))  # bytes of a header; the largest vocabularies take 16 MiB
_TRUE = ("1", "ON", "YES", "TRUE")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "LLAMA_ARG_OFFLINE")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. checksum: its sha256, or git's sha1 for a file outside of large file storage."""

    path: str
    size: int  # bytes
    checksum: str


@dataclass(frozen=True)
class Listing:
    """The GGUF files of a repository at a commit."""

    commit: str
    files: dict[str, RemoteFile]  # by path, in the hub's order


def offline() -> bool:
    """Returns whether the environment forbids the network, by the rules of huggingface_hub and llama.cpp."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in _OFFLINE)


class Hub:
    """The hub of models that the environment names."""

    def __init__(self) -> None:
        """Raises UsageError if huggingface_hub is not installed, or the endpoint is invalid."""
        endpoint = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT") or None
        if endpoint is not None and not _is_url(endpoint):
            raise UsageError(f"HF_ENDPOINT must be the URL of a hub, not '{one_line(endpoint):.80}'")
        try:
            import huggingface_hub
            from huggingface_hub import errors, utils
            from huggingface_hub.utils import http_stream_backoff  # since 1.0
        except ImportError as error:
            raise UsageError(
                "models by name need huggingface_hub: pip install 'kvedge[hub]'; for a model in the cache use "
                f"--offline ({one_line(error):.80})"
            ) from None
        self._hub, self._utils, self._stream = huggingface_hub, utils, http_stream_backoff
        self._status_error = errors.HfHubHTTPError
        # the error of its HTTP client, which is httpx or httpx2
        self._http_error: type[Exception] = next(c for c in errors.HfHubHTTPError.__mro__ if c.__name__ == "HTTPError")
        client = sys.modules[self._http_error.__module__.partition(".")[0]]
        self._no_way = (client.InvalidURL, ImportError)  # an invalid proxy URL; SOCKS without its package
        self._endpoint = endpoint.rstrip("/") if endpoint else None
        self._about: Any = {"library_name": "kvedge", "library_version": package_version()}
        self._where = self._endpoint or "the hub"  # the hub's name in messages

    def listing(self, repo: str) -> Listing:
        """Returns the GGUF files at main's commit. Raises HubError, UnreachableError."""
        with self._answers(repo):
            api = self._hub.HfApi(endpoint=self._endpoint, **self._about)
            # model_info has a time limit and returns checksums; list_repo_tree has no time limit
            info = api.model_info(repo, revision="main", timeout=_TIMEOUT_S, files_metadata=True)
            commit = info.sha or ""
            if not is_commit(commit):
                raise UnreachableError(f"{self._where} gives no commit of {repo}; try again later")
            files = [_file(repo, found) for found in info.siblings or () if found.rfilename.endswith(".gguf")]
        return Listing(commit, {file.path: file for file in files})

    def header(self, repo: str, commit: str, file: RemoteFile) -> Header:
        """Fetches the bytes of a GGUF file that its header needs, and reads the header. Raises HubError, ModelError."""
        name = Path(f"{repo}/{file.path}")
        for most in _BEGINNINGS:
            start, most = bytearray(), min(most, file.size)
            with self._answers(repo), self._get(self._url(repo, commit, file), f"bytes=0-{most - 1}") as response:
                for chunk in response.iter_bytes():
                    start += chunk
                    if len(start) >= most:
                        break
            if header := header_of(name, bytes(start[:most]), file.size):
                return header
        raise ModelError(
            f"{name} cannot be used: its header is larger than {_BEGINNINGS[-1] >> 20} MiB; use another model"
        )

    def append(self, repo: str, commit: str, file: RemoteFile, out: BinaryIO, look: Callable[[int], None]) -> None:
        """Appends the missing rest of a file to `out`; rewrites the whole file if the hub does not send the rest.

        look: called with the number of bytes after each piece. Raises UnreachableError if the connection breaks,
        HubError, and OSError of the file.
        """
        there = out.tell()
        asked = f"bytes={there}-" if there else None
        with self._answers(repo), self._get(self._url(repo, commit, file), asked) as response:
            begins = response.headers.get("Content-Range", "").startswith(f"bytes {there}-")
            if there and response.status_code in (206, 416) and not begins:
                out.truncate(0)
                out.seek(0)
                self.append(repo, commit, file, out, look)
                return
            if there and response.status_code != 206:  # the hub sends the file from the beginning
                out.truncate(0)
                out.seek(0)
                there = 0
            for chunk in response.iter_bytes():  # no chunk size: a broken connection would lose a part of a chunk
                there += len(chunk)
                if there > file.size:
                    raise HubError(
                        f"{self._where} sends more than the {file.size} bytes of {repo}/{file.path}; try again later"
                    )
                out.write(chunk)
                look(there)
        if there < file.size:
            raise UnreachableError(f"{self._where} ended the connection after {there} of {file.size} bytes")

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """Keeps other programs, not only kvedge, from fetching the same file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._utils.WeakFileLock(path):
            yield

    @contextmanager
    def _get(self, url: str, asked: str | None) -> Iterator[Any]:
        headers = self._utils.build_hf_headers(**self._about) | {"Accept-Encoding": "identity"}
        if asked:
            headers["Range"] = asked
        with self._stream(
            "GET", url, headers=headers, timeout=_TIMEOUT_S, max_retries=3, retry_on_exceptions=()
        ) as response:
            if response.status_code != 416 or not asked or asked.startswith("bytes=0-"):  # else append() asks again
                self._utils.hf_raise_for_status(response)
            yield response

    def _url(self, repo: str, commit: str, file: RemoteFile) -> str:
        return self._hub.hf_hub_url(repo, file.path, revision=commit, endpoint=self._endpoint)

    @contextmanager
    def _answers(self, repo: str) -> Iterator[None]:
        """Turns errors of the client into HubError and UnreachableError."""
        try:
            yield
        except HubError:
            raise
        except self._status_error as error:
            raise _refused(repo, self._where, error) from None
        except self._http_error as error:
            why = one_line(error) or type(error).__name__
            raise UnreachableError(f"{self._where} cannot be reached ({why:.120}){_proxies()}") from None
        except ConnectionError as error:  # huggingface_hub raises it if HF_HUB_OFFLINE is set
            raise UnreachableError(f"{self._where} was not contacted: {one_line(error):.120}") from None
        except (NotADirectoryError, IsADirectoryError, PermissionError) as error:  # from the file with the token
            raise HubError(
                f"{error.filename} cannot be read: {error.strerror}; set HF_HOME to another folder"
            ) from None
        except self._no_way as error:
            raise UnreachableError(f"{self._where} cannot be contacted ({one_line(error):.160}){_proxies()}") from None
        except UnicodeEncodeError:
            raise UsageError(
                "HF_TOKEN is invalid: it has a character that is not allowed in a token; set HF_TOKEN to a valid token"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {one_line(error):.80}"
            raise UnreachableError(
                f"{self._where} does not answer like a hub of models ({why}); check HF_ENDPOINT"
            ) from None


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return text.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _proxies() -> str:
    """Returns what to check, with the variables that name a proxy."""
    found = [name for name in _PROXIES if os.environ.get(name) or os.environ.get(name.upper())]
    return f"; check the proxy in {', '.join(found)}" if found else "; check the network"


def _file(repo: str, found: Any) -> RemoteFile:
    checksum = found.lfs.sha256 if found.lfs else found.blob_id
    if not isinstance(found.size, int) or found.size < 0 or not is_checksum(checksum or ""):
        raise HubError(
            f"{repo} gives no size or checksum for {found.rfilename!r:.80}, so the file cannot be "
            f"downloaded; use another repository"
        )
    return RemoteFile(found.rfilename, found.size, checksum)


def _refused(repo: str, where: str, error: Any) -> HubError:
    status = error.response.status_code
    if status >= 500:
        return UnreachableError(f"{where} has an internal error (status {status}); try again later")
    token = "set HF_TOKEN to a token if the repository is private or gated"
    if "authorization" in error.response.request.headers:
        token = "the token in HF_TOKEN is not valid"
    words = {
        401: f"refuses access to {repo}, or the repository does not exist; {token}",
        403: f"refuses access to {repo} with this HF_TOKEN; request access on the page of the repository",
        404: f"has no repository {repo}, or the repository is private; check the name and HF_TOKEN",
        429: "had too many requests; try again in some minutes, or set HF_TOKEN",
    }
    return HubError(f"{where} {words.get(status, f'refused a request for {repo} (status {status})')}")
