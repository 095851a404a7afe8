"""Arguments by other libraries' names: every name of the table is answered or accepted, and others get the nearest name."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from pagetide.api.arguments import UnknownArgument, explains_arguments, explains_names, rows, takes
from pagetide.api.sampling_params import ALIASES, SamplingParams

OWN = [row for row in rows() if row.is_of("SamplingParams")]


def complaint(**given: Any) -> str:
    """What SamplingParams answers."""
    with pytest.raises(UnknownArgument) as caught:
        SamplingParams(**given)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)
    return str(caught.value)


def test_every_name_of_the_table_is_answered() -> None:
    refused = [row for row in OWN if row.kind == "error"]
    for name in {name for row in refused for name in row.names}:
        answers = [row.answer for row in refused if name in row.names]
        assert complaint(**{name: 1}) in [f"SamplingParams has no argument {name!r}: {answer}" for answer in answers]


def test_names_of_the_table_that_are_the_same_are_parameters() -> None:
    named = {name for row in OWN if row.kind in ("same", "alias") for name in row.names}
    assert named <= inspect.signature(SamplingParams).parameters.keys()
    assert {name for row in OWN if row.kind == "alias" for name in row.names} == ALIASES.keys()


def test_exact_answers() -> None:
    assert complaint(stop_strings=["x"]) == (
        "SamplingParams has no argument 'stop_strings': write stop (the text ends before a stop string; token_ids has all "
        "tokens)"
    )
    assert complaint(temprature=1) == "SamplingParams has no argument 'temprature': did you mean 'temperature'?"
    assert complaint(quux=1) == "SamplingParams has no argument 'quux'"
    assert complaint(max_num_seqs=1) == "SamplingParams has no argument 'max_num_seqs': as for LLM: write max_seqs"


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_its_parameter(alias: str, name: str) -> None:
    params = SamplingParams(**{alias: 3})
    assert params == SamplingParams(**{name: 3}) == SamplingParams(**{name: 3, alias: 3})
    assert (getattr(params, alias), getattr(params, name)) == (3, 3)
    assert getattr(SamplingParams(), alias) is None
    assert getattr(replace(params, **{name: 4}), alias) == 4  # the alias does not hold the old value
    said = f"{name} is 4 and {alias} 3: they mean the same; give {name} alone, also to dataclasses.replace"
    with pytest.raises(ValueError, match=said):
        SamplingParams(**{name: 4, alias: 3})
    with pytest.raises(ValueError, match=f"give {name} alone, also to dataclasses.replace"):
        replace(params, **{alias: 4})  # the old value is passed as well: the two cannot be told from a contradiction
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        SamplingParams(**{alias: -1})


@pytest.mark.parametrize(("name", "own"), [("max_new_tokens",) * 2, ("top_k",) * 2, *ALIASES.items(), ("other",) * 2])
def test_parameters_do_not_change(name: str, own: str) -> None:
    params = SamplingParams()
    said = f"^SamplingParams does not change: make another with dataclasses.replace\\(params, {own}=5\\)$"
    with pytest.raises(FrozenInstanceError, match=said):
        setattr(params, name, 5)
    assert params == SamplingParams()


def test_parameters_copy_and_are_plain_data() -> None:
    params = SamplingParams(max_tokens=5, stop=["x"])
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert asdict(params).keys() == {f.name for f in fields(params)}
    assert not asdict(params).keys() & ALIASES.keys()


def test_values_of_other_libraries() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    with pytest.raises(ValueError, match="top_k must be at least 0, got -2"):
        SamplingParams(top_k=-2)
    for name in ("logprobs", "prompt_logprobs"):
        taken = [getattr(SamplingParams(**{name: value}), name) for value in (True, False, 1, None)]
        assert taken == [0, None, 1, None]


class Answer:
    """A class that describes itself as pydantic's models do."""

    @classmethod
    def model_json_schema(cls, by_alias: bool = True) -> dict[str, Any]:
        return {"type": "object", "title": cls.__name__}


class Failing:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        raise TypeError("not described")


def test_a_class_as_schema_is_its_schema() -> None:
    params = SamplingParams(json_schema=Answer)
    assert params.json_schema == {"type": "object", "title": "Answer"}
    assert params.constraint == ("json_schema", '{"type": "object", "title": "Answer"}')
    with pytest.raises(ValueError, match="the class gives no schema: TypeError: not described"):
        SamplingParams(json_schema=Failing)
    with pytest.raises(ValueError, match="json_schema must be a text"):
        SamplingParams(json_schema=dict)  # type: ignore[arg-type]


def test_a_decorated_function_keeps_its_signature_and_checks_names() -> None:
    @explains_arguments("tests.open")
    def takes_others(first: int, **others: int) -> tuple[int, dict[str, int]]:
        return first, others

    @dataclass(frozen=True, kw_only=True)
    class Arguments:
        first: int = field(kw_only=False)
        second: int = 0

    class Some:
        @takes("tests.closed", Arguments)
        def __init__(self, arguments: Arguments) -> None:
            self.given = arguments

    assert takes_others(1, other=2) == (1, {"other": 2})
    with pytest.raises(UnknownArgument, match=r"tests\.open has no argument 'do_sample'"):
        takes_others(1, do_sample=2)
    assert Some(1, second=2).given == Some(first=1, second=2).given == Arguments(1, second=2)
    with pytest.raises(UnknownArgument, match=r"tests\.closed has no argument 'secnd': did you mean 'second'\?"):
        Some(1, secnd=2)  # type: ignore[call-arg]
    assert list(inspect.signature(Some).parameters) == ["first", "second"]
    with pytest.raises(TypeError, match="missing 1 required"):
        Some()  # type: ignore[call-arg]


def test_too_many_by_position() -> None:
    @explains_arguments("tests.call")
    def call(self: object, first: int = 0, *, second: int = 0, third: int = 0) -> int:
        return first

    @explains_arguments("tests.any")
    def takes_any(*first: int) -> int:
        return len(first)

    assert (call(None, 1, second=2), takes_any(1, 2, 3)) == (1, 3)
    with pytest.raises(UnknownArgument, match=r"^tests\.call takes first by position; .*by keyword: second=, third=$"):
        call(None, 1, 2)  # type: ignore[call-arg]


def test_a_property_keeps_its_own_attribute_error() -> None:
    @explains_names("LLM")
    class Named:
        @property
        def text(self) -> str:
            raise AttributeError("its own words")

    with pytest.raises(AttributeError, match=r"^its own words$"):
        _ = Named().text


def test_a_missing_method_is_answered() -> None:
    @explains_names("LLM")
    class Named:
        known = 1

    named: Any = Named()
    assert named.known == 1
    with pytest.raises(AttributeError, match=r"'Named' object has no attribute 'beam_search': write SamplingParams\(num_b"):
        _ = named.beam_search
    with pytest.raises(AttributeError, match=r"'Named' object has no attribute 'nothing'$"):
        _ = named.nothing
    assert not hasattr(named, "_private")
