"""torch's own tests of its DataLoader, run with an ElasticDataLoader in the loader's place.

    python -m tests.support.peers CHECKOUT                 # of torchdata, whose repository has a copy (make test-peers)
    python -m tests.support.peers CHECKOUT --loader torch  # the same tests of torch's own loader, to compare with
    python -m tests.support.peers CHECKOUT -- -k iterable  # what follows goes to pytest

Nothing of the checkout is part of this repository: its file is read, the line that imports the loader is another one in
a copy that goes with the run, and the tests that are left out are named below, each with its reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LEFT_OUT", "LOADERS", "copied", "main"]

FILE = Path("test/stateful_dataloader/test_dataloader.py")
IMPORTED = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"
LOADERS = {
    "elastic": "from elastic_ext import ElasticDataLoader as DataLoader",
    "torch": "from torch.utils.data import DataLoader",
}
_WORKERS = "looks at `_workers` of torch's iterator, which are processes of multiprocessing there"
LEFT_OUT: dict[str, str] = {
    f"{of}::{name}": _WORKERS
    for of in ("TestDataLoader", "TestDataLoaderPersistentWorkers")
    for name in ("test_get_worker_info", "test_iterable_style_dataset", "test_partial_workers", "test_proper_exit")
}
"""The tests that look into private attributes of torch's iterator. What they are about is in tests of our own:
test_loader_workers_as_torch.py, test_streams_as_torch.py and test_loader_faults.py."""


def copied(checkout: Path, loader: str) -> str:
    """The text of the tests with another loader; ValueError where it is none that this knows."""
    path = checkout / FILE
    if not path.is_file():
        raise ValueError(f"{path} is not there; give a checkout of torchdata's repository, of version 0.11 or near it")
    text = path.read_text()
    if IMPORTED not in text:
        raise ValueError(f"{path} has no line `{IMPORTED}`; give a checkout of version 0.11 or near it")
    gone = [name for name in LEFT_OUT if not re.search(rf"def {name.rpartition('::')[2]}\(", text)]
    if gone:
        raise ValueError(f"{path} has no {', '.join(gone)}; give a checkout of version 0.11 or near it")
    return text.replace(IMPORTED, LOADERS[loader])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; gives pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.peers", description=__doc__, formatter_class=_Plain)
    parser.add_argument("checkout", type=Path, help="a checkout of torchdata's repository, outside of this one")
    parser.add_argument("--loader", choices=sorted(LOADERS), default="elastic")
    parser.add_argument("pytest", nargs="*", help="what pytest is given, after --")
    given = parser.parse_args(arguments)
    try:
        text = copied(given.checkout, given.loader)
    except ValueError as error:
        parser.error(str(error))
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}", flush=True)
    here = Path(__file__).resolve().parents[2]
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as folder:
        copy = Path(folder) / FILE.name
        copy.write_text(text)
        command = [sys.executable, "-u", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(copy)]
        command += ["--rootdir", folder, *[f"--deselect={FILE.name}::{name}" for name in LEFT_OUT], *given.pytest]
        return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}).returncode


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Examples stay as they are written."""


if __name__ == "__main__":
    sys.exit(main())
