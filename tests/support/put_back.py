"""An ``elastic-run`` on a machine whose clock is put back by an hour once a file is there: for tests of nodes.

The file is the first argument, and the others are elastic-run's. Nothing of this library is changed: what tells the
time of day to it and to torch's rendezvous is told another one.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

__all__ = ["HOUR"]

HOUR = 3600.0


def put_back_once(file: Path) -> None:
    """Have this process' time of day go back when ``file`` appears; its monotonic clock goes on."""
    time_of_day, time_of_day_ns = time.time, time.time_ns

    def is_back() -> bool:
        return os.path.exists(file)

    class Told(datetime.datetime):
        """What torch's rendezvous asks for the time; plain ones are what it is given."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.fromtimestamp(time.time(), tz)

    vars(time)["time"] = lambda: time_of_day() - is_back() * HOUR
    vars(time)["time_ns"] = lambda: time_of_day_ns() - is_back() * int(HOUR * 1e9)
    vars(dynamic_rendezvous)["datetime"] = Told


if __name__ == "__main__":
    from elastic_ext.run import main

    put_back_once(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
