"""Shell: the page's own files, out of the package."""

from __future__ import annotations

import asyncio
import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from starlette.responses import Response

from .call import Call
from .desk import Desk
from .operation import TEXT, Answer, Operation, Parameter
from .problems import NotFound

TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",  # a new version of the package is a new page at once
}
_FILE: Final = re.compile(r"[a-z0-9_-]{1,40}\.([a-z]{2,4})", re.ASCII)


def operations(desk: Desk) -> list[Operation]:
    """The table's part. The desk comes with each call."""
    names = [one.name for one in _folder().iterdir() if _FILE.fullmatch(one.name)]
    file = Parameter(name="file", place="path", schema={"type": "string", "enum": sorted(names)})
    return [
        Operation(
            name="page",
            method="GET",
            path="/",
            scope=None,
            summary="The page",
            handle=_page,
            answers={200: Answer(about="It.", bodies={TYPES["html"]: TEXT})},
            problems=(404,),
            any_query=True,
        ),
        Operation(
            name="page_file",
            method="GET",
            path="/web/{file}",
            scope=None,
            summary="A file of the page",
            handle=_file,
            parameters=(file,),
            answers={200: Answer(about="It.", bodies=dict.fromkeys(TYPES.values(), TEXT))},
            problems=(404,),
            any_query=True,
        ),
    ]


async def _page(call: Call) -> Response:
    return await _served("index.html")


async def _file(call: Call) -> Response:
    return await _served(call.path["file"])


async def _served(name: str) -> Response:
    found = _FILE.fullmatch(name)
    kind = TYPES.get(found[1]) if found else None
    path = _folder() / name if kind else None
    if kind is None or path is None or not path.is_file():
        raise NotFound("the page has no such file")
    body = await asyncio.to_thread(path.read_bytes)
    return Response(body, headers={**HEADERS, "content-type": kind})


def _folder() -> Traversable:
    return resources.files("bridge") / "web"
