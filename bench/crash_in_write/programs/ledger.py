"""The world outside, the same for every system: a file with one line for each charge.

The first process to charge dies in the middle of it: the line is on disk, the caller never hears.
No system can see the difference between that and a charge that never happened.
"""

from __future__ import annotations

import os
from pathlib import Path

PATH = Path(os.environ["CHARGES"])
DIED = 9


def charge(amount: int) -> str:
    fd = os.open(PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{amount}\n".encode())
    os.fsync(fd)
    os.close(fd)
    count = PATH.read_bytes().count(b"\n")
    if count == 1:
        os._exit(DIED)
    return f"receipt-{count}"
