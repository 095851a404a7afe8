"""HeldBytes: memory that a server holds for requests, within a bound for all of them and one for those of each key."""

from __future__ import annotations

from collections import Counter


class HeldBytes:
    """Counts bytes that are held for requests.

    Attributes:
        most: Bytes that may be held in all.
        num_keys: API keys of the server. Where there are several, one may hold half of all.
        num_bytes: Bytes that are held.
    """

    def __init__(self, most: int, num_keys: int = 0) -> None:
        self.most = most
        self.num_keys = num_keys
        self.num_bytes = 0
        self._of_keys: Counter[str] = Counter()

    @property
    def most_of_key(self) -> int:
        """Bytes that may be held for one key, hence for one request."""
        return self.most // 2 if self.num_keys > 1 else self.most

    def of_key(self, key: str) -> int:
        """Bytes that are held for a key; "" are requests without one."""
        return self._of_keys[key]

    def fits_key(self, key: str, count: int) -> bool:
        """Whether `count` more bytes are within the key's bound."""
        return self._of_keys[key] + count <= self.most_of_key

    def fits(self, count: int) -> bool:
        """Whether `count` more bytes are within the bound of all."""
        return self.num_bytes + count <= self.most

    def hold(self, key: str, count: int) -> None:
        """Count `count` more bytes, or fewer if below 0."""
        self.num_bytes += count
        self._of_keys[key] += count
        if not self._of_keys[key]:
            del self._of_keys[key]
