"""Settings as fields of frozen dataclasses: flags, variables, YAML keys and the reference are made from the fields.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        port: int = setting(8000, integer(0, 65_535), "port to listen on")

A value comes from a flag, a variable or a file as a `Sourced`, with the name of its source. Texts are read by the kind of the
setting. The dataclass checks the values (`checked`), and `located` adds the source to its errors.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from .error_text import said_of
from .units import parse_bytes, parse_seconds

VARIABLES = "PAGETIDE_"  # the prefix of environment variables

Action = Literal["store", "append", "switch"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a setting takes.

    Attributes:
        metavar: The value in a command's help.
        check: Returns the value to keep. Raises ValueError with a text such as "must be above 0, got -1".
        read: A value of a text; a text that it cannot read stays, and `check` refuses it.
        action: Of the flag: "switch" has a --no- form, "append" may be repeated.
    """

    metavar: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any] = str
    action: Action = "store"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: see `described`."""

    kind: Kind
    help: str
    doc: str = ""
    unset: str | None = None
    scope: int = 0
    flags: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    name: str = ""
    default: Any = None

    @property
    def dest(self) -> str:
        """The attribute of parsed arguments."""
        return self.flags[0].lstrip("-").replace("-", "_")

    @property
    def told_default(self) -> str:
        """What holds if the setting is not given; empty if its help says so."""
        if self.unset is not None or self.default is None:
            return self.unset or ""
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return "" if self.default in ((), MISSING, "") else str(self.default)

    @property
    def full_help(self) -> str:
        """The help with the default."""
        return f"{self.help} (default: {self.told_default})" if self.told_default else self.help

    @property
    def documentation(self) -> str:
        """The text for the API's reference."""
        return self.doc or f"{self.full_help[0].upper()}{self.full_help[1:]}."

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add the flag. It has no default: a setting that is not given is left to other sources."""
        options: dict[str, Any] = {"dest": self.dest, "help": self.full_help.replace("%", "%%")}
        if self.kind.action == "switch":
            group.add_argument(*self.flags, action=argparse.BooleanOptionalAction, **options)
            for flag in self.off:
                group.add_argument(flag, dest=self.dest, action="store_const", const=False, help=argparse.SUPPRESS)
        else:
            options |= {"type": self.kind.read, "action": self.kind.action, "metavar": self.kind.metavar}
            group.add_argument(*self.flags, **options)


class Sourced(NamedTuple):
    """A value and where it was given: "run.yaml:12", "PAGETIDE_PORT", "--port". `node` is that of a file."""

    value: Any
    where: str
    node: Any = None


Settings = dict[str, Setting]
Given = dict[str, Sourced]


def described(
    kind: Kind, help: str, *, doc: str = "", unset: str | None = None, scope: int = 0, flags: Sequence[str] = (),
    off: Sequence[str] = (),
) -> Mapping[str, Setting]:  # fmt: skip
    """The metadata of a field that is a setting: of one that has to be given, `name: str = field(metadata=described(...))`.

    Args:
        help: The text for commands and files, without the default.
        doc: The text for the API's reference; by default `help`.
        unset: The default in words, where the value does not say it.
        scope: Where it can be set, as the dataclass defines it; see `settings_of`.
        flags: Its flags; by default its name.
        off: Further flags that switch it off.
    """
    return {"setting": Setting(kind, help, doc, unset, scope, tuple(flags), tuple(off))}


def setting(default: Any, kind: Kind, help: str, *, secret: bool = False, **more: Any) -> Any:
    """A field of a dataclass that is a setting with a default. If that is None, None can be given too.

    Args:
        default: `dict` is an empty one.
        secret: The value is not in the repr.
        more: See `described`.
    """
    metadata = described(kind, help, **more)
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def settings_of(cls: Any, scope: int | None = None) -> Settings:
    """The settings among the fields of a dataclass, by name; with `scope`, those of at most that scope."""
    found = {}
    for one in fields(cls):
        told: Setting | None = one.metadata.get("setting")
        if told is not None and (scope is None or told.scope <= scope):
            flags = told.flags or (f"--{one.name.replace('_', '-')}",)
            found[one.name] = replace(told, name=one.name, default=one.default, flags=flags)
    return found


def checked(cls: Any, given: Mapping[str, Any], invalid: type[ValueError]) -> dict[str, Any]:
    """`given` as the settings of `cls` keep it; other names stay as they are. Raises `invalid`, naming the setting."""
    known, found = settings_of(cls), dict(given)
    for name, one in known.items():
        if name in given and (given[name] is not None or one.default is not None):
            try:
                found[name] = one.kind.check(given[name])
            except (ValueError, TypeError, OverflowError, RuntimeError) as error:
                said, joint = str(error), " " if str(error).startswith("must ") else ": "
                raise invalid(said if said.startswith(name) else f"{name}{joint}{said}") from error
    return found


def lists_settings(of: Any) -> Callable[[type[T]], type[T]]:
    """A class decorator: in its docstring the settings of the dataclass `of` replace "Args: see `NAME`."."""

    def decorate(cls: type[T]) -> type[T]:
        if cls.__doc__ is not None:
            cls.__doc__ = cls.__doc__.replace(f"Args: see `{of.__name__}`.", f"Args:\n{reference(of)}")
        return cls

    return decorate


def reference(cls: Any) -> str:
    """The settings of `cls` as lines of a docstring's "Args"."""
    style: dict[str, Any] = {"width": 120, "initial_indent": " " * 8, "subsequent_indent": " " * 12}
    return "\n".join(textwrap.fill(f"{name}: {one.documentation}", **style) for name, one in settings_of(cls).items())


# ---- sources ------------------------------------------------------------------------------------


def add_flags(group: argparse._ActionsContainer, settings: Settings) -> None:
    """Add a flag for each of `settings`."""
    for one in settings.values():
        one.add_to(group)


def of_flags(args: argparse.Namespace, settings: Settings) -> Given:
    """The values that flags gave."""
    found = {name: (one, getattr(args, one.dest, None)) for name, one in settings.items()}
    return {name: Sourced(value, one.flags[0]) for name, (one, value) in found.items() if value is not None}


def of_environ(environ: Mapping[str, str], settings: Settings) -> Given:
    """The values that variables gave; an empty one is not set."""
    texts = {name: environ.get(f"{VARIABLES}{name.upper()}", "").strip() for name in settings}
    return {name: Sourced(settings[name].kind.read(text), f"{VARIABLES}{name.upper()}") for name, text in texts.items() if text}


def of_file(file: Path, invalid: type[ValueError]) -> Given:
    """The keys of a YAML file, and their places. Raises `invalid`: unreadable, no mapping, or a key twice."""
    from . import yaml_file  # imports yaml, which a process without a file does not need

    try:
        node, content = yaml_file.read_yaml(file)
    except (OSError, yaml_file.InvalidYaml) as error:
        raise invalid(said_of(error)) from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise invalid(f"{file}: must map settings to values, as in `key: value`, got {type(content).__name__}")
    return entries(file, Sourced(content, str(file), node), invalid)


def entries(file: Path, mapping: Sourced, invalid: type[ValueError], name_of: Callable[[str], str] | None = None) -> Given:
    """The keys of a mapping in a file. In names "-" is "_", unless `name_of` makes them. Raises `invalid` for a key twice."""
    found: Given = {}
    written: dict[str, str] = {}
    for key, value in mapping.node.value:  # what `<<` merges stands first
        where = f"{file}:{key.start_mark.line + 1}"
        if key.tag != "tag:yaml.org,2002:str":
            raise invalid(f"{where}: a key must be text, got {key.value!r:.80}")
        name = key.value.replace("-", "_") if name_of is None else name_of(key.value)
        if written.setdefault(name, key.value) != key.value:
            raise invalid(f"{where}: {name} appears twice, first at {found[name].where}: remove one")
        found[name] = Sourced(mapping.value[key.value], where, value)
    return found


def readable(given: Given, settings: Settings) -> Given:
    """`given` with texts of a file read as those of flags; what is None is not given."""
    found = {}
    for name, one in given.items():
        value = one.value.strip() if isinstance(one.value, str) else one.value
        if isinstance(value, str) and name in settings and settings[name].kind.action != "append":
            value = settings[name].kind.read(value)
        if value is not None:
            found[name] = one._replace(value=value)
    return found


def located(given: Given, make: Callable[[], T], invalid: type[ValueError]) -> T:
    """The result of `make`. The first of `given` that its error names is the source of the error."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        name = next((name for name in re.findall(r"[a-z_]+", str(error)) if name in given), None)
        if name is None or str(error).startswith(given[name].where):
            raise
        raise invalid(f"{given[name].where}: {error}") from error


def unknown_setting(name: str, known: Iterable[str], answer: Callable[[str], str | None] | None = None) -> str:
    """What an error says of a setting that is not one of `known`: the `answer` for its name, or the nearest one."""
    if answer is None or (said := answer(name)) is None:
        known = list(known)
        near = difflib.get_close_matches(name, known, n=1)
        said = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"unknown setting {name!r:.80}; {said}"


def check_names(given: Given, known: Iterable[str], invalid: type[ValueError], **answer: Any) -> None:
    """Raise `invalid` for a name that is not one of `known`."""
    known = list(known)
    for name, one in given.items():
        if name not in known:
            raise invalid(f"{one.where}: {unknown_setting(name, known, **answer)}")


# ---- kinds --------------------------------------------------------------------------------------


def _refused(wanted: str, value: Any) -> ValueError:
    return ValueError(f"must be {wanted}, got {value!r:.80}")


def integer(
    least: int = 0, most: int | None = None, what: str = "an integer", also: str | None = None, metavar: str = "N",
    action: Action = "store",
) -> Kind:  # fmt: skip
    """An integer in a range; `also` is a word in its place."""
    wanted = f"{what} of at least {least:,}" if most is None else f"{what} from {least:,} to {most:,}"
    wanted += "" if also is None else f", or {also}"

    def check(value: Any) -> Any:
        if also is not None and value == also:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
            raise _refused(wanted, value)
        return value

    return Kind(metavar, check, _reader(int), action)


def number(least: float = 0, most: float = math.inf, what: str = "a number") -> Kind:
    """A finite number in a range."""
    wanted = f"{what} of at least {least:,.12g}" if most == math.inf else f"{what} from {least:,.12g} to {most:,.12g}"

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise _refused(wanted, value)
        return float(value)

    return Kind("X", check, _reader(int, float))


def seconds(least: float, most: float = math.inf) -> Kind:
    """A number of seconds, or a text such as 20ms, 1.5s or 2h."""

    def read(text: str) -> Any:
        try:
            return parse_seconds(text)
        except ValueError:
            return _reader(int, float)(text)

    return replace(number(least, most, "a number of seconds"), metavar="SECONDS", read=read)


def share() -> Kind:
    """A share above 0 and at most 1; a text may be a percentage."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise _refused("a share above 0 and at most 1, such as 0.9 or 90%", value)
        return float(value)

    def read(text: str) -> Any:
        percent = text.strip().endswith("%")
        amount = _reader(float)(text.strip().removesuffix("%"))
        return text if isinstance(amount, str) else amount / (100 if percent else 1)

    return Kind("SHARE", check, read)


def switch() -> Kind:
    """True or false."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _refused("true or false", value)
        return value

    return Kind("", check, lambda text: words.get(text.strip().lower(), text), "switch")


def text(metavar: str = "TEXT", what: str = "a text", action: Action = "store") -> Kind:
    """A text that is not empty."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise _refused(what, value)
        return value

    return Kind(metavar, check, action=action)


def text_or_file() -> Kind:
    """A text; a flag may name the file that holds it, after an @."""

    def read(given: str) -> str:
        try:
            return Path(given[1:]).read_text("utf-8-sig") if given.startswith("@") else given
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"cannot read {given[1:]}: {error}") from None

    return replace(text("TEXT|@F"), read=read)


def data() -> Kind:
    """A value in YAML."""

    def read(given: str) -> Any:
        from .yaml_file import InvalidYaml, parse_yaml

        try:
            return parse_yaml(given)
        except InvalidYaml as error:
            raise argparse.ArgumentTypeError(f"cannot be read as YAML: {given!r:.80}") from error

    return Kind("YAML", lambda value: value, read)


def choice(*names: str, metavar: str = "NAME") -> Kind:
    """One of some names, which are in lower case; a text may be in any."""

    def check(value: Any) -> Any:
        if value not in names:
            raise _refused(f"one of {', '.join(names)}", value)
        return value

    return Kind(metavar, check, str.lower)


def path(metavar: str = "FILE") -> Kind:
    """A path; ~ is the home directory."""

    def check(value: Any) -> Path:
        return Path(text().check(str(value) if isinstance(value, Path) else value)).expanduser()

    return Kind(metavar, check)


def size(none: str | None = None) -> Kind:
    """Bytes, such as 2GiB. With `none`, the meaning of None, 0 is a size too."""

    def check(value: Any) -> int:
        if none is not None and (value == "0" or (value == 0 and type(value) is int)):
            return 0
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{error}" + (f"; or 0, or None for {none}" if none is not None else "")) from error

    return Kind("SIZE", check)


def items(each: Kind, metavar: str, sep: str = r"[\s,]+") -> Kind:
    """A list, or a text with separators between its parts; kept as a tuple. A flag may be repeated."""

    def check(value: Any) -> tuple[Any, ...]:
        given = [value] if isinstance(value, str) or type(value) is int else value
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) or type(one) is int for one in given):
            raise _refused("a list, such as [0, 1]", value)
        parts = [part.strip() for one in given for part in re.split(sep, str(one)) if part.strip()]
        return tuple(each.check(each.read(part)) for part in parts)

    return Kind(metavar, check, action="append")


def mapping(check: Callable[[str, Any], Any]) -> Kind:
    """A mapping of names to values, each checked by `check`."""

    def checked_all(value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"must map names to values, got {value!r:.80}")
        for name, one in value.items():
            check(name, one)
        return value

    return Kind("", checked_all)


def _reader(*kinds: Callable[[str], Any]) -> Callable[[str], Any]:
    """Read a text by the first of `kinds` that can; else it stays."""

    def read(given: str) -> Any:
        for kind in kinds:
            with suppress(ValueError):
                return kind(given)
        return given.strip()

    return read
