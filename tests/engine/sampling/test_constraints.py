"""Constrained output: the masks, the end of an output, what is refused, and the demo model's documents."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling_oracle import distribution
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pagetide import LLM, SamplingParams
from pagetide.engine.sampling.constraints import Constraints
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Constraint, RequestRejected, Sampling

pytest.importorskip("llguidance")

FOLDER = Path(__file__).resolve().parents[3] / "engine" / "demo_model"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
END = TOKENIZER.eos_token_id
WIDTH = len(TOKENIZER) + 7  # of the logits: a few ids that no token has
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["sea", "land"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # the demo model is fond of spaces, which take steps
}


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(TOKENIZER, WIDTH)


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


class Output:
    """An output under a constraint, in a sampler of its own, behind the prompt "Once"."""

    def __init__(self, constraints: Constraints, constraint: Constraint | None, *tokens: int, **settings: Any) -> None:
        self.prompt, self.tokens = _ids("Once"), list(tokens)
        self.sampling = Sampling(500, constraint=constraint, **{"stop_token_ids": (END,), **settings})
        self.sampler = Sampler(1, WIDTH, constraints=constraints)
        self.sampler.admit(0, self.sampling, np.array(self.prompt + self.tokens, np.int32), len(self.prompt))

    def allowed(self) -> set[int]:
        """What may come next."""
        shares = distribution(self.sampler, np.array([0]), self._at(), torch.zeros(1, WIDTH))[0]
        return set(shares.nonzero().flatten().tolist())

    def go_on(self, logits: torch.Tensor) -> int | None:
        """A token more, from `logits` [vocab]; None where there is none."""
        tokens, bad = self.sampler.sample(np.array([0]), self._at(), logits[None])
        if bad is not None:
            return None
        self.tokens.append(int(tokens[0]))
        return self.tokens[-1]

    def _at(self) -> np.ndarray:
        return np.array([len(self.prompt) + len(self.tokens)])


def _texts(ids: set[int]) -> set[str]:
    return {TOKENIZER.decode([i]) for i in ids}


def test_nothing_else_may_come_and_the_end_where_the_grammar_may_end(constraints: Constraints) -> None:
    output = Output(constraints, ("regex", "ab?"), temperature=1.0, stop_token_ids=(END, 30))
    assert _texts(output.allowed()) == {"a", "ab"}
    output.sampler.record_tokens(np.array([0]), np.array(_ids("a")))
    assert output.allowed() == {*_ids("b"), END, 30}  # both end ids, the ordinary one too
    output.sampler.record_tokens(np.array([0]), np.array(_ids("b")))
    assert output.allowed() == {END, 30}
    endless = Output(constraints, ("regex", "ab?"), *_ids("a"), temperature=1.0, stop_token_ids=())
    assert endless.allowed() == {*_ids("b")}


def test_where_nothing_but_the_end_is_left_it_ends(constraints: Constraints) -> None:
    """Whatever else was asked for; and it is complete then, so that a minimum length does not go on."""
    for settings in [
        {"min_new_tokens": 50},
        {"logit_bias": ((END, -1e30), (5, 1e30))},
        {"logits_processors": (lambda ids, scores: scores.index_fill(1, torch.tensor([END]), -torch.inf),)},
        {"repetition_penalty": 1e30},
        {"min_new_tokens": 50, "temperature": 2.0, "top_p": 0.1, "min_p": 0.9, "top_k": 1},
    ]:
        output = Output(constraints, ("regex", "ab"), **settings)
        numbers, row = torch.Generator().manual_seed(0), np.array([0])
        while (token := output.go_on(torch.randn(WIDTH, generator=numbers))) != END:
            assert token is not None
            assert output.sampler.complete(row) is None
        assert TOKENIZER.decode(output.tokens[:-1]) == "ab"
        complete = output.sampler.complete(row)
        assert complete is not None
        assert complete.tolist() == [True]
        output.sampler.release(row)
        assert output.sampler.complete(row) is None


def test_the_minimum_length_holds_where_it_can(constraints: Constraints) -> None:
    logits = torch.zeros(WIDTH)
    logits[END] = 9.0
    for least in (0, 3, 40):
        output = Output(constraints, ("regex", "[0-9]{1,20}"), min_new_tokens=least)
        while output.go_on(logits.clone()) != END:
            pass
        assert len(TOKENIZER.decode(output.tokens[:-1])) <= 20
        assert len(output.tokens) > least or least == 40


def test_without_an_end_id_it_is_complete_with_its_last_token(constraints: Constraints) -> None:
    """A model may have none, or they may be ignored: nobody else can say that the output is over."""
    output = Output(constraints, ("regex", "tide(s|less)"), stop_token_ids=())
    while output.sampler.complete(np.array([0])) is None:
        assert output.go_on(torch.randn(WIDTH, generator=torch.Generator().manual_seed(len(output.tokens)))) is not None
    assert TOKENIZER.decode(output.tokens) in ("tides", "tideless")


def test_what_rules_out_all_that_it_allows_is_told(constraints: Constraints) -> None:
    ids = tuple((i,) for i in range(WIDTH) if i != END)
    output = Output(constraints, ("regex", "ab"), bad_words=ids)
    assert output.go_on(torch.zeros(WIDTH)) is None
    assert "rules out every token" in (output.sampler.trouble(0) or "")
    strange = Output(constraints, ("regex", "ab"), *_ids("xyz"))  # as an import of something else would have it
    assert strange.go_on(torch.zeros(WIDTH)) is None
    assert "the constraint cannot be followed" in (strange.sampler.trouble(0) or "")
    without = Output(Constraints(None, WIDTH), ("regex", "ab"))
    assert without.go_on(torch.zeros(WIDTH)) is None
    assert "needs a tokenizer" in (without.sampler.trouble(0) or "")


def test_an_ambiguous_grammar_ends_its_own_row_before_its_masks_take_long(constraints: Constraints) -> None:
    ids = _ids("the sea and the house and the sea and the boat by the sea when all of it went away again ") * 3
    _ends_by_its_items(Output(constraints, ("grammar", 'start: s\ns: s s | s s s | /[a-z ]/ | "(" s ")"')), ids, 5)
    ids = _ids("ab ca ac b ab ca acc cc bb c ca a cc a ab acc ") * 8
    _ends_by_its_items(Output(constraints, ("grammar", 'start: a\na: a a | "a" | "b" | " " | "c"')), ids, 20)


def _ends_by_its_items(output: Output, ids: list[int], least: int) -> None:
    for token in ids:
        wanted = torch.nn.functional.one_hot(torch.tensor(token), WIDTH).float()
        if output.go_on(wanted) is None:
            break
    assert least < len(output.tokens) < 80 and output.tokens == ids[: len(output.tokens)]
    trouble = output.sampler.trouble(0) or ""
    assert "Too many items (limit 8000" in trouble and trouble.endswith("use a smaller or less ambiguous one")


def test_rows_are_not_mixed_up(constraints: Constraints) -> None:
    """Constrained, other and failing rows in one batch: each has what it has alone, padding ids never."""
    grammar = 'start: ("x"|"yz")*'
    forms: list[Constraint | None] = [("regex", "[a-z]{30}"), None, ("regex", "[0-9]{30}"), ("grammar", grammar)]
    n, numbers = len(forms), torch.Generator().manual_seed(3)
    settings = [Sampling(99, temperature=1.0, seed=i, constraint=x, stop_token_ids=(END,)) for i, x in enumerate(forms)]
    together, *alone = (Sampler(rows, WIDTH, constraints=constraints) for rows in (n, *[1] * n))
    for row, sampling in enumerate(settings):
        for sampler, at in ((together, row), (alone[row], 0)):
            sampler.admit(at, sampling, np.array([5], np.int32), 1)
    rows, texts = np.array([3, 1, 0, 2]), np.full((n, 8), "", object)
    for step in range(8):
        x = torch.randn((n, WIDTH), generator=numbers)
        x[:, len(TOKENIZER) :] = 3.0
        got, bad = together.sample(rows, np.full(n, 1 + step), x.clone())
        assert bad is None
        for i, row in enumerate(rows):
            single, _ = alone[row].sample(np.array([0]), np.array([1 + step]), x[i : i + 1].clone())
            assert single[0] == got[i]
            texts[row, step] = TOKENIZER.decode([int(got[i])], skip_special_tokens=True)
    assert re.fullmatch("[a-z]+", "".join(texts[0]))
    assert re.fullmatch("[0-9]+", "".join(texts[2]))
    assert re.fullmatch("[xyz]*", "".join(texts[3]))


BAD: list[tuple[Constraint, str]] = [
    (("regex", "("), r'the regex cannot be used: .*invalid regex "\(".*: unclosed group$'),
    (("regex", r"(a)\1"), "the regex cannot be used"),
    (("regex", "((a{100}){100}){100}"), "the regex cannot be used: lexer error: too many expressions"),
    (("json_schema", "{"), "the json_schema cannot be used"),
    (("json_schema", "[]"), "the json_schema cannot be used"),
    (("json_schema", '{"type": "nope"}'), "the json_schema cannot be used: Invalid type: nope"),
    (("json_schema", '{"$ref": "#/nowhere"}'), "the json_schema cannot be used"),
    (("json_schema", "false"), "the json_schema cannot be used: Unsatisfiable"),
    (("grammar", "x: /a/"), "the grammar cannot be used: no start rule"),
    (("grammar", 'start: start "a"'), "the grammar cannot be used"),
    (("grammar", ""), "the grammar cannot be used"),
]


def test_what_cannot_be_kept_is_refused(constraints: Constraints) -> None:
    for constraint, message in BAD:
        for _ in range(2):
            with pytest.raises(RequestRejected, match=message):
                constraints.of(constraint).compile()
        assert not constraints.of(constraint).ready


def test_a_tokenizer_is_needed_that_can_be_worked_with() -> None:
    regex: Constraint = ("regex", "a")
    with pytest.raises(RequestRejected, match="needs a tokenizer, which the model's folder lacks"):
        Constraints(None, 9).of(regex).compile()
    with pytest.raises(RequestRejected, match="needs a tokenizer of the tokenizers library, not int"):
        Constraints(7, 9).of(regex).compile()
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(RequestRejected, match=r"does not work with this model's tokenizer: .*decoder"):
        Constraints(PreTrainedTokenizerFast(tokenizer_object=words), 9).of(regex).compile()
    gap = Tokenizer(models.BPE({"a": 0, "b": 7}, []))
    with pytest.raises(RequestRejected, match="ids have no gaps"):
        Constraints(PreTrainedTokenizerFast(tokenizer_object=gap), 9).of(regex).compile()


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestRejected, match=r"pip install -e '/.*\[constrained\]'"):
        Constraints(TOKENIZER, WIDTH).of(("regex", "a")).compile()


def test_few_are_kept_compiled() -> None:
    """What went is compiled again, and who has a matcher of it goes on."""
    constraints = Constraints(TOKENIZER, WIDTH)
    output = Output(constraints, ("regex", "ab0"), temperature=1.0)
    for i in range(100):
        constraints.of(("regex", f"ab{i}")).compile()
    assert len(constraints._alive) == 64
    again = Output(constraints, ("regex", "ab0"), temperature=1.0)
    assert _texts(output.allowed()) == _texts(again.allowed()) == {"ab"}


def test_a_tokenizer_of_byte_tokens() -> None:
    """As Llama 2's: word marks, and byte tokens for what the vocabulary lacks; no end id among them is needed."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefgh", "▁ab", "好"]
    inner = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    constraints = Constraints(PreTrainedTokenizerFast(tokenizer_object=inner), len(pieces) + 1)
    matcher = constraints.matcher(("regex", "(a| ab|好|é)"))
    allowed = constraints.masks([matcher])[0][0].nonzero()[0]
    first = {i.encode()[0] for i in "a好é "}
    assert {pieces[i] for i in allowed} == {"a", "▁", "▁ab", "好", *(f"<0x{b:02X}>" for b in first)}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """In a pool for some hundred tokens: several documents at once force each other out."""
    with LLM("demo", device="cpu", kv_memory="1MiB", share=False) as made:
        yield made


def _is_document(text: str | None) -> bool:
    document = json.loads(text or "")
    assert list(document) == ["name", "age", "tags"]
    assert isinstance(document["name"], str) and len(document["name"]) <= 6
    assert isinstance(document["age"], int) and 0 <= document["age"] <= 120
    assert 1 <= len(document["tags"]) <= 2 and set(document["tags"]) <= {"sea", "land"}
    return True


def test_documents_are_whole_and_the_same_under_preemption(llm: LLM) -> None:
    scheduler = llm._manager.open().core.scheduler
    # With it they would wait rather than force each other out.
    scheduler.state.limits = replace(scheduler.state.limits, forecast=False)
    kinds = [(0.0, 1), (1.0, 2), (1.5, 1), (1.2, 1), (0.8, 2)]
    params = [
        SamplingParams(json_schema=SCHEMA, temperature=temperature, seed=seed, max_new_tokens=90, n=n)
        for seed, (temperature, n) in enumerate(kinds)
    ]
    crowded = llm.generate([f"Person {i}:" for i in range(len(params))], params)
    assert llm.stats()["preemptions"] > 0
    for output in crowded:
        for completion in output.completions:
            assert (completion.finish_reason, completion.token_ids[-1]) == ("stop", END)
            assert _is_document(completion.text)
    forced_out = max(range(len(params)), key=lambda i: crowded[i].num_preemptions)
    for i in {1, forced_out}:
        alone = llm.generate(f"Person {i}:", params[i])[0]
        assert [c.token_ids for c in alone.completions] == [c.token_ids for c in crowded[i].completions]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"(yes|no), [A-Z][a-z]{3,9}\."}, r"(yes|no), [A-Z][a-z]{3,9}\."),
        ({"regex": r"^\d{3}-\d{4}$"}, r"\d{3}-\d{4}"),
        ({"grammar": 'start: item ("," item){1,3}\nitem: /[a-z]{2}/ | "(" start ")"'}, r"[a-z(][a-z,()]*[a-z)]"),
        ({"json_schema": {"enum": ["high", "low", 5, None]}}, r'"high"|"low"|5|null'),
    ],
)
def test_the_whole_output_matches(llm: LLM, form: dict[str, Any], pattern: str) -> None:
    params = [SamplingParams(**form, temperature=1.0, seed=seed, max_new_tokens=200) for seed in range(4)]
    for output in llm.generate(["The sea"] * 4, params):
        if output.finish_reason == "stop" or "grammar" not in form:
            assert re.fullmatch(pattern, output.text or ""), output.text
            assert (output.text or "").count("(") == (output.text or "").count(")")


def test_a_bad_one_is_refused_and_the_engine_goes_on(llm: LLM) -> None:
    expected = llm.generate("The sea", SamplingParams(max_new_tokens=5, temperature=0))[0].token_ids
    for bad in ({"regex": "("}, {"json_schema": {"type": "nope"}}, {"grammar": "nothing"}):
        with pytest.raises(RequestRejected, match="cannot be used"):
            llm.generate(["The sea", "The land"], [SamplingParams(max_new_tokens=5), SamplingParams(**bad)])
        assert llm.stats()["waiting"] == llm.stats()["running"] == 0
    assert llm.generate("The sea", SamplingParams(max_new_tokens=5, temperature=0))[0].token_ids == expected


@pytest.mark.parametrize("rule", ['r{}: "a" r{}', "r{}: r{}", 'R{}: "a" R{}'])
def test_rules_in_a_long_chain_do_not_overflow_the_stack(constraints: Constraints, rule: str) -> None:
    most = 6_000
    name = rule[0]
    chain = "\n".join(rule.format(i, i + 1) for i in range(most))
    matcher = constraints.matcher(("grammar", f'start: {name}0\n{chain}\n{name}{most}: "b"'))
    assert not matcher.is_error()
