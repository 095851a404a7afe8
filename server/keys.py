"""API keys: who may use the server, and how much of it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..cache.retention import Retention
from ..common.yaml_file import InvalidYaml, read_yaml
from .errors import ApiError

LEAST_KEY_CHARACTERS = 8
MOST_PRIORITY = 1000  # of a request, and as many below 0


class KeysInvalid(ValueError):
    """A key file is wrong; the message names file and entry."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and its limits. None is no limit.

    Attributes:
        digest: SHA-256 of the key.
        max_requests: Requests at the same time.
        max_sequences: Sequences of its requests at the same time: prompts times `n` or `best_of`.
        max_blocks: KV blocks that its requests may come to need at the same time.
        tokens_per_minute: Tokens of prompts and outputs.
        max_retention_s: That a request may ask its prompt to be kept; longer times are shortened.
        max_retained_blocks: KV blocks that are kept at the same time because its requests ask for it.
        least_priority: The lowest `priority` of its requests; lower ones go first. An admin key may give any.
    """

    name: str
    digest: bytes = field(repr=False)
    admin: bool = False
    max_requests: int | None = None
    max_sequences: int | None = None
    max_blocks: int | None = None
    tokens_per_minute: int | None = None
    max_retention_s: int | None = None
    max_retained_blocks: int | None = None
    least_priority: int = 0

    def bounded(self, hint: Retention) -> Retention:
        """What is left of a hint of how long a prompt is worth keeping, within the key's limits."""
        seconds = hint.seconds if self.max_retention_s is None else min(hint.seconds, float(self.max_retention_s))
        return replace(hint, seconds=seconds, owner=self.name, max_blocks=self.max_retained_blocks)

    def check_priority(self, priority: int) -> None:
        """Raise ApiError if a request with this key may not have this priority."""
        if priority < self.least_priority and not self.admin:
            raise ApiError(
                403,
                f"the key {self.name} may give a priority of {self.least_priority} or more (lower ones go first), got "
                f"{priority}: `least_priority` in the key file permits lower ones",
                param="priority",
            )


def digest_of(key: str) -> bytes:
    """The digest of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class ApiKeys:
    """The keys of a server. Without any, everybody who reaches it may use it."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key."""
        return any(key.admin for key in self._keys)

    @property
    def has_users(self) -> bool:
        """Whether there is a key that is no admin key: requests need one then."""
        return any(not key.admin for key in self._keys)

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key in an Authorization header (`Bearer KEY`); None if it is unknown. Takes equally long for all keys."""
        scheme, _, given = (authorization or "").partition(" ")
        found = self.of_digest(digest_of(given.strip()))
        return found if scheme.lower() == "bearer" else None

    def of_digest(self, digest: bytes) -> ApiKey | None:
        """The key with this digest; None if it is unknown. Takes equally long for all keys."""
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def read_keys(file: Path | None, environ: Mapping[str, str]) -> ApiKeys:
    """The keys of a YAML file, and of PAGETIDE_API_KEY and PAGETIDE_ADMIN_KEY (several are separated by commas), without the
    white space around them.

    The file maps names to keys, or to mappings of `key` and the limits of `ApiKey`.

    Raises KeysInvalid.
    """
    found: list[ApiKey] = []
    if file is not None:
        try:
            _, data = read_yaml(file)
        except (OSError, InvalidYaml) as error:
            raise KeysInvalid(f"the key file {file} cannot be read: {error}") from error
        if not isinstance(data, Mapping) or not data:
            raise KeysInvalid(f"the key file {file} must map names to keys, as in `alice: sk-...`")
        found += [_key(str(name).strip(), value, f"{file}: {name}") for name, value in data.items()]
    for variable, admin in (("PAGETIDE_API_KEY", False), ("PAGETIDE_ADMIN_KEY", True)):
        given = [key.strip() for key in environ.get(variable, "").removeprefix("\ufeff").split(",") if key.strip()]
        for number, key in enumerate(given, 1):
            name = f"{variable.lower()}-{number}"
            found.append(_key(name, {"key": key, "admin": admin}, variable))
    if len({key.digest for key in found}) < len(found):
        raise KeysInvalid("two names have the same key")
    names = [key.name for key in found]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise KeysInvalid(f"two keys are named {twice!r}: they would share limits, cached prefixes and output")
    return ApiKeys(found)


def _key(name: str, value: Any, where: str) -> ApiKey:
    if not name or not name.isprintable():  # requests without a key have no name
        raise KeysInvalid(f"{where!r:.200}: a key's name must be printable characters, and not empty: give it another")
    options = dict(value) if isinstance(value, Mapping) else {"key": value}
    key = options.pop("key", None)
    if not isinstance(key, str) or len(key := key.strip()) < LEAST_KEY_CHARACTERS:
        raise KeysInvalid(f"{where}: a key needs at least {LEAST_KEY_CHARACTERS} characters")
    known = {one.name for one in fields(ApiKey)} - {"name", "digest"}
    for option, limit in options.items():
        if option not in known:
            raise KeysInvalid(f"{where}: unknown option {option!r}; known are {', '.join(sorted(known))}")
        wanted = bool if option == "admin" else int
        least = -MOST_PRIORITY if option == "least_priority" else 1
        if not isinstance(limit, wanted) or (wanted is int and (isinstance(limit, bool) or limit < least)):
            needed = "true or false" if wanted is bool else f"a number of {least} or more"
            raise KeysInvalid(f"{where}: {option} must be {needed}")
    return ApiKey(name, digest_of(key), **options)


class KeyUse:
    """What one key uses now."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self.num_sequences = 0
        self.num_blocks = 0
        self.turn = asyncio.Lock()
        self._key = key
        self._clock = clock
        self._tokens_left = float(key.tokens_per_minute or 0)
        self._filled_at = clock()

    def retry_after_s(self, count: int = 1) -> float | None:
        """Seconds until `count` tokens are left, or a whole minute's if `count` is more; None if there are."""
        most = self._key.tokens_per_minute
        if most is None:
            return None
        now = self._clock()
        self._tokens_left = min(float(most), self._tokens_left + (now - self._filled_at) * most / 60)
        self._filled_at = now
        needed = min(count, most)
        return None if self._tokens_left >= needed else (needed - self._tokens_left) * 60 / most

    def count_tokens(self, count: int) -> None:
        """Charge tokens, or give them back if below 0."""
        self._tokens_left -= count
