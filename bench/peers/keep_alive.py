"""A light HTTP/1.1 client that keeps its connections: the client must not be what is measured."""

from __future__ import annotations

import asyncio

from processes import HOST


class Http:
    """Requests to one port of this machine, each on a connection that is free."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(
        self, path: str, body: bytes = b"", method: str = "POST", accept: str = "*/*"
    ) -> bytes:
        """The answer's body. Raises RuntimeError where its status is no 2xx."""
        while True:
            used = bool(self._free)
            reader, writer = self._free.pop() if used else await self._connected()
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Accept: {accept}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                break
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                if not used:  # an idle one may have been closed
                    raise
        answer = await _body(reader, head.lower())
        self._free.append((reader, writer))
        if head[9:10] != b"2":
            raise RuntimeError(f"{path}: {head[:15]!r} {answer[:300]!r}")
        return answer

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self._port, limit=1 << 22)


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if b"content-length:" in head:
        return await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    if b"transfer-encoding: chunked" not in head:
        return b""
    found = b""
    while size := int((await reader.readline()).strip(), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return found
