"""Certificates for tests of connections that are encrypted, made by openssl, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["Certificate", "certificate_in"]


class Certificate(NamedTuple):
    """One of 127.0.0.1, which is checked by itself, and its key."""

    cert: Path
    key: Path


def certificate_in(folder: Path, *, name: str = "IP:127.0.0.1", days: int = 2) -> Certificate:
    """A new one of ``name``, in files of ``folder``; the test is skipped where none can be made."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder.mkdir(exist_ok=True)
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days {days} -subj /CN=master "
        f"-addext subjectAltName={name} -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=60)
    return Certificate(folder / "cert.pem", folder / "key.pem")
