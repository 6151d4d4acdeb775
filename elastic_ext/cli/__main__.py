"""python -m elastic_ext.cli: the same as elastic-ext."""

from __future__ import annotations

import sys

from elastic_ext.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
