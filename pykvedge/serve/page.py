"""The page at `/`: files that lie in the folder page_files, as they are. It asks for nothing from anywhere else."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from pykvedge.errors import RequestError
from pykvedge.serve.service import Service

_FOLDER = Path(__file__).with_name("page_files")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # pictures of the conversation are data: and blob: URLs
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


async def index(service: Service, http: HttpRequest) -> Response:
    """GET /."""
    return _file("index.html")


async def part(service: Service, http: HttpRequest) -> Response:
    """GET /page/NAME: a file of the page."""
    return _file(http.path_params["name"])


def _file(name: str) -> Response:
    if name not in {path.name for path in _FOLDER.iterdir()}:
        raise RequestError(404, f"the page has no {name:.80}", "not_found")
    path = _FOLDER / name
    return FileResponse(path, media_type=_KINDS.get(path.suffix, "application/octet-stream"), headers=_HEADERS)
