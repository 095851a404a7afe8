"""A byte-level tokenizer, trained on a few texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level(texts: Sequence[str], vocab_size: int, specials: Sequence[Any] = ()) -> Tokenizer:
    """BPE over all bytes, the special tokens first. Nothing is put before or behind a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(specials),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Counting:
    """A tokenizer that counts the characters it is given, and the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_characters = self.num_decoded = 0

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.num_characters += len(text)
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += len(ids)
        return str(self._tokenizer.decode(ids, **options))
