"""The settings of `pagetide serve`: from flags, PAGETIDE_* variables and a YAML file, in this order.

Imports none of the server's libraries: the flags are there without them.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..api.arguments import table_answer
from ..common.checked_file import InvalidFile, read_checked
from ..common.error_text import said_of
from ..common.settings import (
    VARIABLES,
    Given,
    Sourced,
    check_names,
    checked,
    choice,
    entries,
    integer,
    items,
    located,
    number,
    of_environ,
    of_file,
    path,
    readable,
    seconds,
    setting,
    settings_of,
    size,
    switch,
    text,
)
from ..engine.config import EngineArguments, Scope
from .residency import Residency, RouterRules
from .response_templates import names

_MOST_PEM_BYTES = 1 << 20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# The longest contexts: a million tokens, as ids of up to 6 digits or as text
MOST_BODY_BYTES = 8 << 20
ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # with the one that this machine calls
# Arguments of `LLM` that are settings for all models, and those that one model may have.
ENGINE_SETTINGS = settings_of(EngineArguments, Scope.SERVER)
ENGINE_OPTIONS = settings_of(EngineArguments, Scope.ENTRY)
_MODEL_KEYS = ("name", "model", "response_format", "chat_template")
_KEEP_ALIVE_S = 300.0  # of models that are loaded when asked for, as Ollama's
_OF_MODELS = (*_MODEL_KEYS, "keep_alive", "record", "record_text")  # settings that a model's entry may have too
# Variables that are no settings of the file.
_OTHER_VARIABLES = ("CONFIG", "SERVE_CONFIG", "API_KEY", "ADMIN_KEY", "RUNTIME_DIR", "GID", "CACHE_SIZE")
_NEAR = 0.8  # as similar is an unknown variable to one that it is meant to be

log = logging.getLogger(__name__)


class ServeConfigInvalid(ValueError):
    """A setting is wrong; the message names it and where it came from."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to serve under a name.

    Attributes:
        reference: A name of a models file, a folder, or a hub id in the local cache.
        engine: Arguments of `LLM`.
        response_format: How the model writes its answers; None: as its tokenizer and chat template say.
        chat_template: A chat template, used instead of the model's own; among settings the name of its file.
        residency: When it is loaded, and how long it stays.
    """

    name: str
    reference: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    response_format: str | None = None
    chat_template: str | None = None
    residency: Residency = field(default_factory=Residency)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """The settings that name models."""

    # fmt: off
    model: tuple[str, ...] = setting(
        (), items(text(), "MODEL", sep=","), "another way to name a model; repeatable", flags=["--model"],
    )
    served_model_name: tuple[str, ...] = setting(
        (), items(text(), "NAME", sep=","), "name of the model in requests; repeat for each model",
    )
    # fmt: on


_KEEP_ALIVE = replace(number(-1), metavar="SECONDS", read=seconds(0).read)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySettings:
    """When the model of an entry is loaded, and how long it stays. An entry that says any of this is loaded when asked for."""

    # fmt: off
    keep_alive: float | None = setting(
        None, _KEEP_ALIVE, "how long the model stays loaded without requests; -1 is forever", unset="as for all models",
    )
    pinned: bool = setting(False, switch(), "the model is never unloaded by itself")
    preload: bool = setting(False, switch(), "load the model at the start")
    # fmt: on


def _check_proxy(given: Any) -> str:
    try:
        if given != "*":
            ipaddress.ip_network(given)
    except ValueError:
        raise ValueError(f"must have addresses such as 10.0.0.1 or 10.0.0.0/8, got {given!r:.80}") from None
    return str(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The settings of a server. Parsing a body costs the streams more than its bytes do: see `bodies`."""

    # fmt: off
    host: str = setting("127.0.0.1", text("ADDRESS"), "address to listen on")
    port: int = setting(8000, integer(0, 65_535, "a port"), "port to listen on; 0 picks a free one")
    api_key_file: Path | None = setting(None, path(), "YAML file with API keys and their limits")
    models_dir: Path | None = setting(
        None, path("DIR"), "folder of models: its subfolders and GGUF files are served by name, each loaded when asked for",
    )
    models_memory: int | None = setting(
        None, size(), "memory for the weights of loaded models together; beyond it the least recently used idle one sleeps",
        unset="as many as can be loaded",
    )
    preload: tuple[str, ...] = setting(
        (), items(text(), "NAME", sep=","), "model of --models-dir to load at the start; repeatable",
    )
    pinned: tuple[str, ...] = setting(
        (), items(text(), "NAME", sep=","), "model of --models-dir that is never unloaded by itself; repeatable",
    )
    keep_alive: float = setting(
        _KEEP_ALIVE_S, _KEEP_ALIVE, "how long a model of --models-dir stays loaded without requests; -1 is forever",
    )
    load_timeout: float = setting(300.0, seconds(0, 1e9), "how long a request waits for its model to be loaded or woken up")
    min_resident_s: float | None = setting(
        None, seconds(0, 1e9), "how long a model stays loaded at least before another takes its place",
        unset="four times its loading, at least 1 s",
    )
    max_queue: int = setting(256, integer(), "maximum number of waiting sequences; beyond it requests get 429")
    drain_timeout: float = setting(30.0, seconds(0, 1e9), "how long running requests may finish after SIGTERM")
    chat_template: Path | None = setting(None, path(), "chat template to use instead of the models' own")
    response_format: str | None = setting(
        None, choice(*names(), metavar="NAME"), "format of reasoning and tool calls, such as qwen3-coder, or plain",
        unset="detected from the template",
    )
    cors_origin: tuple[str, ...] = setting(
        (), items(text(), "URL"), "origin of web pages that may call; * allows all; repeatable",
    )
    allowed_host: tuple[str, ...] = setting((), items(text(), "NAME"), "accepted Host header; repeatable")
    forwarded_allow_ips: tuple[str, ...] = setting(
        (), items(replace(text(), check=_check_proxy), "LIST"),
        "trusted proxies and networks for X-Forwarded-For, separated by commas; * trusts all", unset="none",
    )
    max_body: int = setting(
        MOST_BODY_BYTES, size(), "maximum size of a request body, which fits a prompt of a million tokens", unset="8 MiB",
    )
    ignore_unknown_fields: bool = setting(False, switch(), "accept unknown fields in requests")
    open_metrics: bool = setting(False, switch(), "serve /metrics without an API key")
    access_log: bool = setting(True, switch(), "log each request, as a line of JSON")
    record: Path | None = setting(
        None, path(), "record the cache's activity for `pagetide replay`; of several models each adds its name to the file's",
    )
    record_text: bool = setting(False, switch(), "also record prompts and outputs")
    ssl_certfile: Path | None = setting(None, path(), "TLS certificate chain")
    ssl_keyfile: Path | None = setting(None, path(), "TLS private key")
    # fmt: on
    models: tuple[ModelOptions, ...] = ()

    @property
    def router_rules(self) -> RouterRules:
        """When models leave for others."""
        return RouterRules(self.load_timeout, self.models_memory, self.min_resident_s)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def url(self) -> str:
        """An address at which this machine reaches the server, for people."""
        host = ALL_ADDRESSES.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{self.port}"

    @property
    def recorded_models(self) -> tuple[ModelOptions, ...]:
        """The models, each with the file of its recording among its engine's arguments, unless it has one of its own."""
        if self.record is None:
            return self.models
        return tuple(
            replace(one, engine={"record": self._recording_of(one), "record_text": self.record_text, **one.engine})
            for one in self.models
        )

    def _recording_of(self, model: ModelOptions) -> str:
        assert self.record is not None
        if len(self.models) == 1:
            return str(self.record)
        suffix = "".join(self.record.suffixes[-2:]) if self.record.suffix == ".gz" else self.record.suffix
        name = re.sub(r"[^\w.-]+", "_", model.name)  # a hub id has a slash
        return str(self.record.with_name(f"{self.record.name.removesuffix(suffix)}.{name}{suffix}"))

    @classmethod
    def resolve(
        cls, given: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None, models: Sequence[ModelOptions] = ()
    ) -> ServeConfig:
        """The settings: `given` on the command line (None: not given), in `environ`, in `file`, else the defaults.

        Args:
            given: By the names of EVERY.
            models: Those named on the command line, instead of those of `environ` and the file.

        A model's entry in the file goes before what the top of the file says for all models. Warns in the log of variables that
        look like misspelled settings. Raises ServeConfigInvalid.
        """
        environ = {name: value.strip().removeprefix("\ufeff") for name, value in environ.items()}
        _warn_of_variables(environ)
        flags = {name: Sourced(value, EVERY[name].flags[0]) for name, value in given.items() if value is not None}
        first = of_environ(environ, EVERY) | readable(flags, EVERY)  # goes before models' entries
        in_file = {} if file is None else readable(of_file(file, ServeConfigInvalid), EVERY)
        in_file = {name: one for name, one in in_file.items() if one.value != ""}
        check_names(in_file, [*EVERY, "models"], ServeConfigInvalid, answer=table_answer)
        entries_of = in_file.pop("models", None)
        if entries_of is not None and "model" in in_file:
            raise ServeConfigInvalid(f"{in_file['model'].where}: give either model or models")
        merged = in_file | first
        own, names = _checked(cls, merged), _checked(ModelNames, merged)
        _check_engine(merged)
        found = list(models) or [ModelOptions(name, name) for name in names.get("model", ())]
        if not found and file is not None and entries_of is not None:
            found = _models(file, entries_of, [name for name in _OF_MODELS if name in first], own)
        served = names.get("served_model_name", ())
        if (folder := own.get("models_dir")) is not None:
            named = {one.name for one in found if entries_of is not None}  # an entry goes before the folder's model
            found += [one for one in _in_folder(folder, own) if one.name not in named]
            served = [*served, *(one.name for one in found[len(served) :])] if served else ()
        if served and len(served) != len(found):
            raise ServeConfigInvalid(f"{len(found)} models, but {len(served)} served_model_name: give one for each")
        top, over = (_engine(where) for where in (in_file, first))
        template = own.get("chat_template")
        config = cls(**own, models=tuple(
            replace(
                model, name=served[i] if served else model.name, engine=top | dict(model.engine) | over,
                response_format=model.response_format or own.get("response_format"),
                chat_template=model.chat_template or (None if template is None else str(template)),
            )
            for i, model in enumerate(found)
        ))  # fmt: skip
        config._check()
        return config

    def _check(self) -> None:
        if not self.models:
            raise ServeConfigInvalid("no model given: use `pagetide serve MODEL`, or `models:` in the configuration file")
        names = [model.name for model in self.models]
        for setting_name in ("preload", "pinned"):
            if unknown := set(getattr(self, setting_name)) - set(names):
                raise ServeConfigInvalid(f"{setting_name} names {min(unknown)!r}; there are {', '.join(names)}")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ServeConfigInvalid(f"two models are named {twice.pop()!r}: rename one of them")
        if odd := [name for name in names if any("\ud800" <= one <= "\udfff" for one in name)]:  # of a file system, say
            raise ServeConfigInvalid(f"the name {odd[0]!r} is not UTF-8, and no request could give it: rename the model")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ServeConfigInvalid("TLS needs both --ssl-certfile and --ssl-keyfile")
        if self.ssl_certfile is not None and self.ssl_keyfile is not None:
            _check_tls(self.ssl_certfile, self.ssl_keyfile)
        if self.record_text and self.record is None:
            raise ServeConfigInvalid("record_text needs a file to record to: --record FILE")
        files = [model.engine.get("record") for model in self.recorded_models]
        if twice := {file for file in files if file is not None and files.count(file) > 1}:
            raise ServeConfigInvalid(f"two models record to {twice.pop()}: give one of them another name")


# All settings but the models themselves, by name.
EVERY = {**settings_of(ModelNames), **settings_of(ServeConfig), **ENGINE_SETTINGS}


def _in_folder(folder: Path, own: Mapping[str, Any]) -> list[ModelOptions]:
    """The models of a folder by name: subfolders with a configuration, and GGUF files (of several parts the first).

    Raises ServeConfigInvalid if there are none.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ServeConfigInvalid(f"models_dir: {said_of(error)}") from error
    found = []
    for one in paths:
        name = one.name if (one / "config.json").is_file() else one.stem if _is_whole_gguf(one) else None
        if name is not None:
            found.append(ModelOptions(name, str(one.absolute()), residency=_residency(name, EntrySettings(), own)))
    if not found:
        raise ServeConfigInvalid(f"models_dir: {folder} has no subfolder with a config.json and no GGUF file")
    return found


def _residency(name: str, entry: EntrySettings, own: Mapping[str, Any]) -> Residency:
    """Of a model that is loaded when asked for, by its entry and the settings for all models."""
    keep_s = own.get("keep_alive", _KEEP_ALIVE_S) if entry.keep_alive is None else entry.keep_alive
    return Residency(keep_s, entry.pinned or name in own.get("pinned", ()), entry.preload or name in own.get("preload", ()))


def _is_whole_gguf(file: Path) -> bool:
    part = re.search(r"-(\d{5})-of-\d{5}$", file.stem)
    return file.suffix == ".gguf" and file.is_file() and (part is None or int(part[1]) == 1)


def _check_tls(certificates: Path, key: Path) -> None:
    is_encrypted = False
    for name, file, block in (("ssl_certfile", certificates, "CERTIFICATE"), ("ssl_keyfile", key, "PRIVATE KEY")):
        try:
            content = read_checked(file, _MOST_PEM_BYTES, "certificates and keys")
        except (OSError, InvalidFile) as error:
            raise ServeConfigInvalid(f"{name}: {said_of(error)}") from error
        if re.search(rb"^-----BEGIN [A-Z0-9 ]*%b-----" % block.encode(), content, re.MULTILINE) is None:
            raise ServeConfigInvalid(
                f"{name}: {file} is not PEM with a {block.lower()}: no line is -----BEGIN {block}-----; convert it with openssl"
            )
        is_encrypted = is_encrypted or b"ENCRYPTED" in content
    if is_encrypted:  # OpenSSL asks for the password at the start
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificates, key)
    except ssl.SSLError as error:
        raise ServeConfigInvalid(
            f"ssl_certfile: TLS cannot use {certificates} with the key in {key}: "
            f"{(error.reason or 'invalid PEM').replace('_', ' ').lower()}; check them with openssl x509 and openssl pkey"
        ) from error


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Warn of PAGETIDE_* variables that nothing reads and that look like a setting."""
    names = [name.upper() for name in EVERY] + [*_OTHER_VARIABLES]
    for variable in environ:
        name = variable.removeprefix(VARIABLES)
        if not variable.startswith(VARIABLES) or name in names or not environ[variable]:
            continue
        if near := difflib.get_close_matches(name, names, n=1, cutoff=_NEAR):
            log.warning("unknown variable %s; did you mean %s%s?", variable, VARIABLES, near[0])


def _checked(cls: Any, given: Given) -> dict[str, Any]:
    """Those of `given` that are settings of `cls`, checked. Raises ServeConfigInvalid, which names the source."""
    values = {name: one.value for name, one in given.items() if name in settings_of(cls)}
    return located(given, lambda: checked(cls, values, ServeConfigInvalid), ServeConfigInvalid)


def _check_engine(given: Given) -> None:
    """Check the settings of engines, as far as nothing else is needed. Raises ServeConfigInvalid, which names the source."""
    located(given, lambda: checked(EngineArguments, _engine(given), ServeConfigInvalid), ServeConfigInvalid)


def _engine(given: Given) -> dict[str, Any]:
    return {name: given[name].value for name in ENGINE_SETTINGS if name in given}


def _models(file: Path, listed: Sourced, overridden: Sequence[str], of_all: Mapping[str, Any]) -> list[ModelOptions]:
    """The entries of `models`; `overridden` is left out of them, and `of_all` are the settings for all models."""
    if not isinstance(listed.value, list):
        raise ServeConfigInvalid(f"{listed.where}: a list was expected, got {listed.value!r:.80}")
    found = []
    for value, node in zip(listed.value, listed.node.value, strict=True):
        where = f"{file}:{node.start_mark.line + 1}"
        if isinstance(value, str):
            found.append(ModelOptions(value, value))
            continue
        given = entries(file, Sourced(value, where, node), ServeConfigInvalid) if isinstance(value, Mapping) else {}
        if "model" not in given or not isinstance(given["model"].value, str):
            raise ServeConfigInvalid(f"{where}: an entry is a model, or a mapping with `model:`, got {value!r:.80}")
        of_entry = settings_of(EntrySettings)
        check_names(given, [*_MODEL_KEYS, *of_entry, *ENGINE_OPTIONS], ServeConfigInvalid, answer=table_answer)
        model = given.pop("model").value
        name = str(given.pop("name").value or model) if "name" in given else model
        on_demand = not given.keys().isdisjoint(of_entry)
        given = {key: one for key, one in readable(given, {**ENGINE_OPTIONS, **of_entry}).items() if key not in overridden}
        own = _checked(ServeConfig, {key: given.pop(key) for key in _MODEL_KEYS if key in given})
        when = _checked(EntrySettings, {key: given.pop(key) for key in of_entry if key in given})
        residency = _residency(name, EntrySettings(**when), of_all) if on_demand else Residency()
        _check_engine(given)
        template, engine = own.get("chat_template"), {key: one.value for key, one in given.items()}
        template = None if template is None else str(template)
        found.append(ModelOptions(name, model, engine, own.get("response_format"), template, residency))
    return found
