"""How much a tokenizer may lengthen a text; as a script, the trial of a folder's tokenizer (`tokenizer_trial`).

The parts of a tokenizer (https://huggingface.co/docs/tokenizers) are data of its file, and twelve replacements of "e" by ten of
it make 10^12 characters of one. Imports nothing of this package, so that the script begins quickly.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

MOST_GROWTH = 1 << 16  # a load fails beyond; bounds of real tokenizers are 2 to 5,000
TRIAL_CPU_S = 60
TRIED = 4  # status of a trial that came to its end; libraries may exit with 0
# Status of a trial without its libraries: they may lie where only the program that loads looks for them
UNTRIED = 3
_UNICODE = 11  # most bytes that compatibility decomposition makes of one (https://unicode.org/faq/normalization.html)
_KINDS = {
    "NFC": 3, "NFD": 3, "NFKC": _UNICODE, "NFKD": _UNICODE, "Lowercase": 2, "Strip": 1, "StripAccents": 1, "Nmt": 3,
    "BertNormalizer": 6, "ByteLevel": 2, "Metaspace": 4, "Split": 1, "Digits": 1, "Punctuation": 1, "Whitespace": 1,
    "WhitespaceSplit": 1, "BertPreTokenizer": 1, "CharDelimiterSplit": 1, "UnicodeScripts": 1, "FixedLength": 1,
    "BPEDecoder": 2, "WordPiece": 2, "CTC": 1, "Fuse": 1, "ByteFallback": 1, "RobertaProcessing": 1, "BertProcessing": 1,
}  # fmt: skip
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
PARTS = ("normalizer", "pre_tokenizer", "post_processor")
_TEXTS = ("The sea was calm, 42 boats.", " \t\n a\u00e9\u4e16\U0001f30a\u0301 ...", "x" * 64)


def growth(part: Mapping[str, Any] | None) -> float:
    """The most bytes that a part of a tokenizer, as its file has it, makes of one. Raises KeyError, TypeError, ValueError for
    something else.
    """
    if part is None:
        return 1
    kind = part["type"]
    if kind == "Sequence":
        product = 1.0
        for one in next(part[name] for name in _LISTS if name in part):
            product *= growth(one)
        return product
    if kind == "Replace":
        content, (pattern,) = _length(part["content"]), part["pattern"].items()
        if pattern[0] == "String" and pattern[1]:
            return max(1, content / _length(pattern[1]))
        return 1 + content  # it may be found everywhere
    if kind == "Prepend":
        return 1 + _length(part["prepend"])
    if kind == "TemplateProcessing":
        return max(1, *(sum("Sequence" in one for one in part[name]) / (1 + (name == "pair")) for name in ("single", "pair")))
    if kind == "Precompiled":
        data = base64.b64decode(part["precompiled_charsmap"] or "")
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")  # behind the trie
        return max(1, *map(len, texts))
    return _KINDS.get(kind, _UNICODE)


def growth_of(part: Any) -> float:
    """As `growth`, of a part of a loaded tokenizer; 1 for one in Python, which the user has written."""
    try:
        return growth(None if part is None else json.loads(part.__getstate__()))
    except Exception:
        return 1


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has failed: such errors are no `Exception`, and their class cannot be imported."""
    return type(error).__name__ == "PanicException"


def refusal(parts: Mapping[str, Any]) -> str | None:
    """Why a tokenizer of these parts is not used: it makes too much of a text, or of tokens."""
    most = 1.0
    for name in PARTS:
        most *= growth(parts.get(name))
    most = max(most, growth(parts.get("decoder")))
    if most <= MOST_GROWTH:
        return None
    return f"its parts may make {most:,.0f} characters of one, and {MOST_GROWTH:,} are the most"


def _length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def main() -> None:
    """Load the tokenizer and use it. Exits with TRIED, or with a reason on standard error; or does not come so far."""
    folder, memory, options = sys.argv[1:]
    try:
        import resource

        for kind, most in ((resource.RLIMIT_AS, int(memory)), (resource.RLIMIT_CPU, TRIAL_CPU_S), (resource.RLIMIT_CORE, 0)):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    except (ImportError, ValueError, OSError):  # not on this system
        pass
    file = os.path.join(folder, "tokenizer.json")
    tokenizer: Any
    try:
        __import__("tokenizers" if os.path.isfile(file) else "transformers")
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(UNTRIED)
    if os.path.isfile(file):
        with open(file, encoding="utf-8") as opened:
            parts = json.load(opened)
        if (why := refusal(parts)) is not None:
            sys.exit(why)
        del parts
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(file)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **json.loads(options))
    for text in _TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.decode(getattr(ids, "ids", ids)[:1024])
    os._exit(TRIED)


if __name__ == "__main__":
    main()
