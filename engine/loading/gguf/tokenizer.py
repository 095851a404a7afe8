"""The tokenizer, chat template and generation settings of a GGUF file, as the files that transformers has for them.

The metadata has a vocabulary with kinds and scores of tokens, and the name of the rule by which text is split. That rule is not
in the file: here are those of the families that are read, and a file with another one is refused. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedModel
from .file import GgufFile

_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6  # kinds of tokens
_SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(then)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(then)s"
)
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END
_GPT4O = _CASED % {"then": f"{_CONTRACTIONS}?"} + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _END
_TEKKEN = _CASED % {"then": ""} + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _END
# How text is split, by `tokenizer.ggml.pre`; None: as GPT-2 does it, and "smollm" besides by digits.
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None, "smollm": None,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}  # fmt: skip
_WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")  # tokens are taken whole before merges; and texts have a BOS
# Texts of tokens that end an answer, beside those that the metadata names.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>",
    "<|end_of_text|>",
)  # fmt: skip
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def generation_of(file: GgufFile) -> dict[str, Any]:
    """The content of `generation_config.json`: ids that end an answer, and the sampling that the file recommends."""
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    special = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind in (_CONTROL, _USER_DEFINED)}
    ends = [file.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    ends += [special.get(text) for text in _ENDS if text != "<|end|>" or "<|return|>" not in special]  # gpt-oss: of a message
    generation: dict[str, Any] = {}
    if ids := [one for one in dict.fromkeys(ends) if one is not None]:
        generation["eos_token_id"] = ids
    for name in ("bos", "padding"):
        if (one := file.get(f"tokenizer.ggml.{name}_token_id", int, None)) is not None:
            generation[f"{'pad' if name == 'padding' else name}_token_id"] = one
    given = {name: file.get(f"general.sampling.{key}", (int, float), None) for name, key in _SAMPLING.items()}
    if given["temperature"]:
        generation |= {"do_sample": True, **{name: value for name, value in given.items() if value is not None}}
    return generation


def write_tokenizer(file: GgufFile, folder: Path) -> bool:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`; False if the file has no tokenizer.

    Raises CheckpointError, and UnsupportedModel for a kind that is not read.
    """
    if "tokenizer.ggml.model" not in file.metadata or file.metadata["tokenizer.ggml.model"] == "none":
        return False
    (folder / "tokenizer.json").write_text(json.dumps(_GgufVocabulary(file).tokenizer()), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_settings(file)), "utf-8")
    return True


def _settings(file: GgufFile) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens", list)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        one = file.get(f"tokenizer.ggml.{key}_token_id", int, None)
        if one is not None and 0 <= one < len(tokens):
            settings[f"{name}_token"] = tokens[one]
    if (template := file.get("tokenizer.chat_template", str, None)) is not None:
        named = {
            name: file.get(f"tokenizer.chat_template.{name}", str, "")
            for name in file.get("tokenizer.chat_templates", list, [])
        }
        all_of_them = [{"name": name, "template": source} for name, source in {"default": template, **named}.items()]
        settings["chat_template"] = all_of_them if named else template
    return settings


class _GgufVocabulary:
    """The vocabulary of a file. Raises CheckpointError where it contradicts itself."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._model = file.get("tokenizer.ggml.model", str)
        tokens = file.get("tokenizer.ggml.tokens", list)
        self._kinds = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
        rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else len(tokens)
        if not all(isinstance(one, str) for one in tokens) or len(self._kinds) != len(tokens) or not 0 < len(tokens) <= rows:
            self._refuse(f"{len(tokens):,} tokens, {len(self._kinds):,} kinds of them, and an embedding of {rows:,}")
        if twice := len(tokens) - len({*tokens}):
            self._refuse(f"{twice:,} of {len(tokens):,} tokens twice")
        if self._model == "llama" and file.architecture.startswith("gemma"):  # runs of spaces are spelled as such there
            known = {*tokens}
            tokens = [spelled if one and (spelled := one.replace(" ", _SPACE)) not in known else one for one in tokens]
        self._tokens: list[str] = tokens
        self._ids = {text: i for i, text in enumerate(tokens)}

    def _refuse(self, what: str) -> None:
        raise CheckpointError(f"{self._file.path} has a tokenizer with {what}; fetch or convert it again")

    def tokenizer(self) -> dict[str, Any]:
        """The content of `tokenizer.json`."""
        if self._model == "gpt2":
            parts = self._byte_level()
        elif self._model == "llama":
            parts = self._gemma() if self._file.architecture.startswith("gemma") else self._sentencepiece()
        else:
            raise UnsupportedModel(
                f"{self._file.path} has a tokenizer of kind {self._model!r:.40}, and gpt2 and llama are read; give the model's "
                "own as --tokenizer, or take the model in safetensors form"
            )
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added(), **parts,
                "post_processor": self._post_processor()}  # fmt: skip

    def _added(self) -> list[dict[str, Any]]:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": self._tokens[i], **plain, "special": kind == _CONTROL}
            for i, kind in enumerate(self._kinds)
            if kind in (_CONTROL, _USER_DEFINED) and self._tokens[i]
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        """What adds the tokens at the beginning and the end of a text."""
        around: list[list[dict[str, Any]]] = []
        named: dict[str, Any] = {}
        begins = self._model == "llama" or self._file.get("tokenizer.ggml.pre", str, "") in _WHOLE
        for name, default in (("bos", begins), ("eos", False)):
            one = self._file.get(f"tokenizer.ggml.{name}_token_id", int, None)
            adds = self._file.get(f"tokenizer.ggml.add_{name}_token", bool, default) and one is not None
            if adds and not 0 <= one < len(self._tokens):
                self._refuse(f"{name}_token_id {one} of {len(self._tokens):,} tokens")
            text = self._tokens[one] if adds else ""
            around.append([{"SpecialToken": {"id": text, "type_id": 0}}] if adds else [])
            named |= {text: {"id": text, "ids": [one], "tokens": [text]}} if adds else {}
        if not named:
            return None
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        single = [*around[0], first, *around[1]]
        pair = [*single, *around[0], second, *around[1]]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": named}

    def _byte_level(self) -> dict[str, Any]:
        """Byte-level BPE, with merges."""
        rule = self._file.get("tokenizer.ggml.pre", str, "")
        if rule not in _SPLITS:
            raise UnsupportedModel(
                f"{self._file.path} has a tokenizer that splits text by the rule {rule!r:.40}, which is not known here; give "
                "the model's own as --tokenizer, or take the model in safetensors form"
            )
        split, level = _SPLITS[rule], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        before: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if rule == "smollm" else []
        if split is not None:
            before = [{"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}]
        pre = {"type": "Sequence", "pretokenizers": [*before, {**level, "use_regex": split is None}]}
        merges = self._file.get("tokenizer.ggml.merges", list)
        pairs = [one.split(" ", 1) for one in merges if isinstance(one, str)]
        if len(pairs) != len(merges) or any(len(pair) != 2 or "".join(pair) not in self._ids for pair in pairs):
            self._refuse("merges that are not of its tokens")
        model = self._bpe(pairs, ignore_merges=rule in _WHOLE)
        normalizer = {"type": "NFC"} if split is _QWEN2 else None
        return {"normalizer": normalizer, "pre_tokenizer": pre, "decoder": {**level, "use_regex": True}, "model": model}

    def _sentencepiece(self) -> dict[str, Any]:
        """BPE over whole texts with their spaces as `_SPACE`, and bytes for what the vocabulary lacks."""
        scores = self._file.get("tokenizer.ggml.scores", list)
        if len(scores) != len(self._tokens):
            self._refuse(f"{len(self._tokens):,} tokens and {len(scores):,} scores")
        prefix = self._file.get("tokenizer.ggml.add_space_prefix", bool, True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        normalizer = (
            {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]} if prefix else replace
        )
        return {
            "normalizer": normalizer,
            "pre_tokenizer": None,
            "decoder": _decoder([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
            "model": self._bpe(self._implied_merges(scores), byte_fallback=True),
        }

    def _gemma(self) -> dict[str, Any]:
        """As `_sentencepiece`, without a space before a text, and merges in the order of tokens."""
        return {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
            "decoder": _decoder([]),
            "model": self._bpe(self._implied_merges([-i for i in range(len(self._tokens))]), byte_fallback=True),
        }

    def _bpe(
        self, merges: Sequence[Sequence[str]], *, byte_fallback: bool = False, ignore_merges: bool = False
    ) -> dict[str, Any]:
        unknown = self._file.get("tokenizer.ggml.unknown_token_id", int, None)
        if unknown is not None and not 0 <= unknown < len(self._tokens):
            self._refuse(f"unknown_token_id {unknown} of {len(self._tokens):,} tokens")
        return {
            "type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "unk_token": self._tokens[unknown] if unknown is not None and byte_fallback else None, "fuse_unk": byte_fallback,
            "byte_fallback": byte_fallback, "ignore_merges": ignore_merges, "vocab": self._ids, "merges": [*map(list, merges)],
        }  # fmt: skip

    def _implied_merges(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """All pairs of tokens that make a token, those of the highest scores first."""
        ids, found = self._ids, []
        for text, score, kind in zip(self._tokens, scores, self._kinds, strict=True):
            if kind in (_CONTROL, _UNUSED, _BYTE):
                continue
            pairs = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in ids and text[i:] in ids]
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            found += [(-score, len(left), len(right), left, right) for left, right in pairs]
        found.sort(key=lambda one: one[:3])
        return [(left, right) for *_, left, right in found]


def _decoder(more: list[dict[str, Any]]) -> dict[str, Any]:
    spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *more]}
