"""Shell: placeholder until the bench helper's file lands."""

from typing import Any
from collections.abc import Callable


class Bench:
    def __init__(self, *, quick: bool, progress: Callable[[str], None]) -> None: ...
    async def run(self) -> dict[str, Any]:
        return {}


def render(result: dict[str, Any]) -> list[str]:
    return []
