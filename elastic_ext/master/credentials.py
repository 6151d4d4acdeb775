"""Tokens: the secret that callers of a master have to give, in a file that its owner alone can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from elastic_ext.errors import in_words
from elastic_ext.records.files import NotRegularError, open_regular

__all__ = ["LEAST_CHARACTERS", "MOST_CHARACTERS", "make_token", "read_token"]

LEAST_CHARACTERS = 16
MOST_CHARACTERS = 4096
_BYTES = 32  # random ones, in a token that make_token makes
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ALLOWED = f"one line of {LEAST_CHARACTERS} to {MOST_CHARACTERS} printable ASCII characters without blanks"


def read_token(path: Path) -> str:
    """The token in ``path``; ValueError says what is wrong with the file, and never what it holds."""
    try:
        with open_regular(path) as file:
            _check_owner(path, os.fstat(file.fileno()))
            data = file.read(MOST_CHARACTERS + 2)
    except FileNotFoundError:
        raise ValueError(f"the token file {path} does not exist; give one that the master has too") from None
    except NotRegularError as error:
        raise ValueError(f"the token file cannot be used: {error}; allowed: {_ALLOWED}") from None
    except OSError as error:
        raise ValueError(f"the token file cannot be read: {in_words(error)}") from None
    return _token_in(data, path)


def make_token(path: Path) -> None:
    """Write a new token into ``path``, which must not exist yet: FileExistsError otherwise; OSError where it cannot."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask says
        file.write(secrets.token_urlsafe(_BYTES) + "\n")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"the token file {path} belongs to user {status.st_uid}; allowed: one of the user who runs this "
            f"({os.geteuid()})"
        )
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(
            f"the token file {path} has mode {mode:04o}, so that others than its owner may use it; allowed: 0600 or "
            f"0400; do: chmod 600 {path}"
        )


def _token_in(data: bytes, path: Path) -> str:
    line = data.removesuffix(b"\n").removesuffix(b"\r")
    if not line:
        raise ValueError(f"the token file {path} is empty; allowed: {_ALLOWED}")
    if len(line) > MOST_CHARACTERS:
        raise ValueError(f"the token file {path} holds more than a token; allowed: {_ALLOWED}")
    if len(line) < LEAST_CHARACTERS:
        raise ValueError(f"the token in {path} has {len(line)} characters; allowed: {_ALLOWED}")
    if not all(0x21 <= byte <= 0x7E for byte in line):
        raise ValueError(f"the token file {path} holds characters that no token has; allowed: {_ALLOWED}")
    return line.decode("ascii")
