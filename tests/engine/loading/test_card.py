"""A card as the external process of `pagetide stress` uses it: torch's calls by a stand-in, as no card is here."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from pagetide.common.frames import ChannelClosed
from pagetide.engine.errors import DeviceNotFound
from pagetide.engine.loading import card
from pagetide.pressure import Card, serve_pieces

TOTAL = 1000


class Piece:
    """What torch allocates."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class FakeTorch:
    """Counts bytes as a driver does: what is freed stays with the allocator until its cache is emptied."""

    uint8 = "uint8"

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.living = weakref.WeakSet[Piece]()
        self.version = SimpleNamespace(cuda="13.0")
        self.cuda = SimpleNamespace(
            empty_cache=self._empty_cache,
            get_device_properties=lambda device: SimpleNamespace(uuid="8a6e", name="NVIDIA H200"),
            mem_get_info=lambda device: (TOTAL - self.taken_bytes, TOTAL),
        )

    def empty(self, num_bytes: int, *, dtype: object, device: object) -> Piece:
        assert (dtype, device) == ("uint8", "cuda:1")
        if self.taken_bytes + num_bytes > TOTAL:
            raise RuntimeError("CUDA out of memory")
        self.taken_bytes += num_bytes
        piece = Piece(num_bytes)
        self.living.add(piece)
        return piece

    def _empty_cache(self) -> None:
        self.taken_bytes = sum(piece.num_bytes for piece in self.living)


class Parent:
    """Says what to hold, and notes what is said to be held and what the driver has taken."""

    def __init__(self, torch: FakeTorch, *wanted: int) -> None:
        self.torch, self.wanted, self.heard = torch, list(wanted), list[tuple[int, int]]()

    def send(self, held: int) -> None:
        self.heard.append((held, self.torch.taken_bytes))

    def receive(self) -> int:
        if not self.wanted:
            raise ChannelClosed
        return self.wanted.pop(0)


def test_pieces_go_back_to_the_driver_and_what_it_refuses_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = FakeTorch()
    monkeypatch.setattr(card, "torch", torch)
    device: Any = "cuda:1"
    parent: Any = Parent(torch, 300, 800, 2000, 500, 300, 900, 0)
    serve_pieces(parent, *card.card_pieces(device))
    held = [0, 300, 800, 800, 800, 300, 900, 0]  # whole pieces: of 300, 500 and 600 bytes
    assert parent.heard == [(size, size) for size in held]
    facts = Card(**card.card_facts(device))
    assert facts == Card("cuda:1", "GPU-8a6e", "NVIDIA H200", TOTAL, "13.0")


def test_auto_without_a_card_is_none_and_a_named_one_is_told_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert card.find_card("auto") is None
    with pytest.raises(DeviceNotFound, match="'cuda:7' is not available"):
        card.find_card("cuda:7")
