"""The file with the token that changes over HTTP need. Its owner alone may read it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from ..common.checked_file import InvalidFile, open_checked
from .errors import ConfigInvalid

_LEAST_CHARACTERS, _MOST_BYTES = 16, 4096


def prepare_token(file: Path) -> None:
    """Make the file with a random token if there is none. Raises ConfigInvalid if it cannot be made or used."""
    if not file.exists():
        try:
            _make(file)
        except FileExistsError:  # another process made it first
            pass
        except OSError as error:
            raise ConfigInvalid(
                f"the token file {file} cannot be made: {error.strerror}. Name another with --token-file"
            ) from error
    read_token(file)


def read_token(file: Path) -> str:
    """The token. Raises ConfigInvalid if the file is missing, another user's, readable by others, or holds none."""
    try:
        with open_checked(file, "tokens") as opened:
            found = os.fstat(opened.fileno())
            if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigInvalid(
                    f"the token file {file} must belong to the monitor's user and be readable by no other: chmod 600 {file}"
                )
            token = opened.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except InvalidFile as error:
        raise ConfigInvalid(str(error)) from error
    except OSError as error:
        raise ConfigInvalid(f"the token file {file} cannot be read: {error.strerror}") from error
    if len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ConfigInvalid(
            f"the token file {file} needs a line of at least {_LEAST_CHARACTERS} printable ASCII characters; remove it: "
            "the next start makes one"
        )
    return token


def is_authorized(header: str, token: str) -> bool:
    """Whether an Authorization header has the token, as "Bearer TOKEN". Takes the same time for every wrong token."""
    scheme, _, given = header.partition(" ")
    digests = (hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (given.strip(), token))
    return hmac.compare_digest(*digests) and scheme.lower() == "bearer"


def _make(file: Path) -> None:
    """Write a new file as a whole, so that none without a token is left where the disk is full."""
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
            opened.flush()
            os.fsync(descriptor)
        os.link(unfinished, file)  # unlike a rename it replaces nothing
    finally:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
