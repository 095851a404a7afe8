"""The settings of `pagetide serve`: from flags, PAGETIDE_* variables and a YAML file, in this order."""

from __future__ import annotations

import difflib
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..api.arguments import table_answer
from ..common.checked_file import InvalidFile, read_checked
from ..common.error_text import said_of
from ..common.yaml_file import InvalidYaml, read_yaml
from .admission import MOST_BODY_BYTES
from .guard import LOOPBACK
from .models import ModelOptions
from .tools import TOOL_PARSERS, ToolParser

DEFAULT_MAX_QUEUE = 256
_MOST_PEM_BYTES = 1 << 20
DEFAULT_DRAIN_S = 30.0
VARIABLES = "PAGETIDE_"
ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # with the one that this machine calls
_MODEL_KEYS = ("name", "model", "tool_call_parser", "chat_template")
# Settings that a model's entry may have too.
_OF_MODELS = ("tool_call_parser", "chat_template", "record", "record_text")
# Arguments of `LLM` that are settings, for all models, with the types of their variables.
ENGINE_SETTINGS = {
    "device": "str", "devices": "str", "tensor_parallel_size": "int", "dtype": "str", "quantization": "str",
    "kv_cache_dtype": "str", "kv_memory": "str",
    "block_size": "int | auto", "attention": "str", "max_seqs": "int", "max_step_tokens": "int", "max_model_len": "int",
    "max_chunk_tokens": "int", "prefix_cache_memory": "str", "host_kv_memory": "str", "prefix_caching": "bool",
    "idle_s": "float", "share": "bool", "overlap": "bool", "cuda_graphs": "bool", "self_check": "bool",
}  # fmt: skip
# And those that one model may have besides.
ENGINE_OPTIONS = (*ENGINE_SETTINGS, "record", "record_text", "tokenizer", "trust_remote_code", "kv_events")
NAMES = ("model", "served_model_name")  # lists; `model` is a shorter `models`
# Variables that are no settings of the file.
_OTHER_VARIABLES = ("CONFIG", "SERVE_CONFIG", "API_KEY", "ADMIN_KEY", "RUNTIME_DIR", "GID", "CACHE_SIZE")
_NEAR = 0.8  # as similar is an unknown variable to one that it is meant to be

log = logging.getLogger(__name__)


class ServeConfigInvalid(ValueError):
    """A setting is wrong; the message names it and where it came from."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The settings of a server.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        api_key_file: YAML file of API keys; see `keys.read_keys`.
        chat_template: File with a chat template, used instead of the models' own.
        tool_call_parser: hermes, llama3, mistral or none; default: as the chat template says.
        cors_origin: Origins of web pages that may call.
        allowed_host: Further names in the Host header.
        forwarded_allow_ips: Proxies and networks with an X-Forwarded-For and X-Forwarded-Proto to believe; "*" is all.
        max_queue: Sequences that may wait; more get 429.
        drain_timeout: Seconds that running requests have after SIGTERM.
        max_body: Largest body of a request, in bytes. The default fits a prompt of a million tokens as token ids (8 bytes each,
            with comma and space) and as text (4 to 6 bytes). Parsing costs the streams more than bytes do: see `bodies`.
        ignore_unknown_fields: Accept requests with unknown fields.
        open_metrics: Serve /metrics without an API key.
        access_log: Write a JSON line for each request.
        ssl_certfile: TLS certificate chain.
        ssl_keyfile: TLS private key.
        record: File of a recording for `pagetide replay`; of several models each has its name before the suffix.
        record_text: Put prompts and outputs into it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    chat_template: Path | None = None
    tool_call_parser: ToolParser | None = None
    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ()
    max_queue: int = DEFAULT_MAX_QUEUE
    drain_timeout: float = DEFAULT_DRAIN_S
    max_body: int = MOST_BODY_BYTES
    ignore_unknown_fields: bool = False
    open_metrics: bool = False
    access_log: bool = True
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    record: Path | None = None
    record_text: bool = False
    models: tuple[ModelOptions, ...] = ()

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
        cls,
        given: Mapping[str, Any],
        environ: Mapping[str, str],
        file: Path | None = None,
        models: Sequence[ModelOptions] = (),
        engine: Mapping[str, Any] | None = None,
    ) -> ServeConfig:
        """The settings: `given` on the command line (None: not given), in `environ`, in `file`, else the defaults.

        Args:
            given: May have `served_model_name` too.
            models: Those named on the command line, instead of those of `environ` and the file.
            engine: Arguments of `LLM` on the command line.

        A model's entry in the file goes before what the top of the file says for all models. Warns in the log of variables that
        look like misspelled settings. Raises ServeConfigInvalid.
        """
        from_file = {} if file is None else _read(file)
        environ = {name: _stripped(value.strip().removeprefix("\ufeff")) for name, value in environ.items()}
        environ = {name: value for name, value in environ.items() if value}  # empty: not set
        _warn_of_variables(environ)
        values: dict[str, Any] = {}
        before: dict[str, Any] = {}  # what goes before the models' entries
        for name in (one.name for one in fields(cls) if one.name != "models"):
            variable = f"{VARIABLES}{name.upper()}"
            if given.get(name) is not None:
                values[name] = before[name] = _value(name, given[name], f"--{name.replace('_', '-')}")
            elif variable in environ:
                values[name] = before[name] = _value(name, environ[variable], variable)
            elif name in from_file:
                values[name] = _value(name, from_file[name], f"{file}: {name}")
        first = _engine_variables(environ) | dict(engine or {})
        top = {name: from_file[name] for name in ENGINE_SETTINGS if name in from_file}
        found = [
            replace(model, engine=top | dict(model.engine) | first)
            for model in models
            or _models(environ, from_file, f"{file}: models", [name for name in _OF_MODELS if name in before])
        ]
        names = given.get("served_model_name") or _names("served_model_name", environ, from_file)
        if names and len(names) != len(found):
            raise ServeConfigInvalid(f"{len(found)} models, but {len(names)} served_model_name: give one for each")
        if names:
            found = [replace(model, name=name) for model, name in zip(found, names, strict=True)]
        template = values.get("chat_template")
        config = cls(
            **values,
            models=tuple(
                replace(
                    model,
                    tool_parser=model.tool_parser or values.get("tool_call_parser"),
                    chat_template=model.chat_template or (None if template is None else str(template)),
                )
                for model in found
            ),
        )
        config._check()
        return config

    def _check(self) -> None:
        if not self.models:
            raise ServeConfigInvalid("no model given: use `pagetide serve MODEL`, or `models:` in the configuration file")
        names = [model.name for model in self.models]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ServeConfigInvalid(f"two models are named {twice.pop()!r}: rename one of them")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ServeConfigInvalid("TLS needs both --ssl-certfile and --ssl-keyfile")
        if self.ssl_certfile is not None and self.ssl_keyfile is not None:
            _check_tls(self.ssl_certfile, self.ssl_keyfile)
        if not 0 <= self.port < 65536:
            raise ServeConfigInvalid(f"the port must be from 0 to 65535, got {self.port}")
        if self.max_queue < 0 or self.max_body < 1 or not 0 <= self.drain_timeout < float("inf"):
            raise ServeConfigInvalid("max_queue and drain_timeout must be at least 0, max_body at least 1")
        if self.record_text and self.record is None:
            raise ServeConfigInvalid("record_text needs a file to record to: --record FILE")
        files = [model.engine.get("record") for model in self.recorded_models]
        if twice := {file for file in files if file is not None and files.count(file) > 1}:
            raise ServeConfigInvalid(f"two models record to {twice.pop()}: give one of them another name")
        for proxy in self.forwarded_allow_ips:
            if proxy != "*" and not _is_network(proxy):
                raise ServeConfigInvalid(
                    f"forwarded_allow_ips names addresses such as 10.0.0.1 or 10.0.0.0/8, got {proxy!r:.80}"
                )


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


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _read(file: Path) -> dict[str, Any]:
    try:
        _, data = read_yaml(file)
    except (OSError, InvalidYaml) as error:
        raise ServeConfigInvalid(f"{file} cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise ServeConfigInvalid(f"{file} must map settings to values")
    known = [*(one.name for one in fields(ServeConfig)), *ENGINE_SETTINGS, *NAMES]
    settings = by_name(data, str(file))
    for name in settings:
        if name not in known:
            raise ServeConfigInvalid(f"{file}: {unknown_setting(name, known)}")
    settings = {name: _stripped(value) for name, value in settings.items()}
    unset = {name for name, value in settings.items() if value == "" or (value is None and name not in ENGINE_SETTINGS)}
    return {name: value for name, value in settings.items() if name not in unset}


def _stripped(value: Any) -> Any:
    """A value without the white space around its texts."""
    if isinstance(value, Mapping):
        return {name: _stripped(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_stripped(one) for one in value]
    return value.strip() if isinstance(value, str) else value


def with_underscores(name: str) -> str:
    """A setting's name as here, of one that may have hyphens."""
    return name.replace("-", "_")


def by_name(
    given: Mapping[Any, Any],
    where: str,
    invalid: type[ValueError] = ServeConfigInvalid,
    name_of: Callable[[str], str] = with_underscores,
) -> dict[str, Any]:
    """Settings by their names. Raises `invalid` for a name that two of them have."""
    settings: dict[str, Any] = {}
    for written, value in given.items():
        if (name := name_of(str(written))) in settings:
            first = next(one for one in given if name_of(str(one)) == name)
            raise invalid(f"{where}: {name} appears twice, as {first!r:.80} and {written!r:.80}: remove one")
        settings[name] = value
    return settings


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """What an error says of a setting that is none of `known`: what it is called here, or the nearest one."""
    if (said := table_answer(name)) is None:
        near = difflib.get_close_matches(name, known, n=1)
        said = f"did you mean {near[0]}?" if near else None
    return f"unknown setting {name!r}" + (f"; {said}" if said else "")


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Warn of PAGETIDE_* variables that nothing reads and that look like a setting."""
    known = [*(one.name for one in fields(ServeConfig) if one.name != "models"), *ENGINE_SETTINGS, *NAMES]
    names = [name.upper() for name in known] + [*_OTHER_VARIABLES]
    for variable in environ:
        name = variable.removeprefix(VARIABLES)
        if not variable.startswith(VARIABLES) or name in names:
            continue
        if near := difflib.get_close_matches(name, names, n=1, cutoff=_NEAR):
            log.warning("unknown variable %s; did you mean %s%s?", variable, VARIABLES, near[0])


def _engine_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """The engine's settings among the variables. Raises ServeConfigInvalid."""
    found: dict[str, Any] = {}
    for name, kind in ENGINE_SETTINGS.items():
        text = environ.get(variable := f"{VARIABLES}{name.upper()}")
        if text is None:
            continue
        try:
            found[name] = text if kind.endswith("auto") and text == "auto" else _parsed(kind.partition(" ")[0], text)
        except ValueError as error:
            raise ServeConfigInvalid(f"{variable} must be a value of type {kind}, got {text!r:.80}") from error
    return found


def _names(name: str, environ: Mapping[str, str], from_file: Mapping[str, Any]) -> list[str]:
    """A list of names: in a variable separated by commas, in the file a text or a list."""
    given = environ.get(f"{VARIABLES}{name.upper()}", from_file.get(name))
    if isinstance(given, str):
        return [part.strip() for part in given.split(",") if part.strip()]
    return [] if given is None else [str(one) for one in _list(given)]


def _models(
    environ: Mapping[str, str], from_file: Mapping[str, Any], where: str, overridden: Sequence[str]
) -> list[ModelOptions]:
    """The models that PAGETIDE_MODEL or the file names; of their entries, `overridden` is left out."""
    if "models" in from_file and "model" in from_file:
        raise ServeConfigInvalid(f"{where}: give either model or models")
    named = _names("model", environ, {} if "models" in from_file else from_file)
    entries = [_model(entry, where, overridden) for entry in _list(from_file.get("models") or [])]
    return [ModelOptions(name, name) for name in named] or entries


def _parsed(kind: str, value: Any) -> Any:
    """`value` as a bool, int, float or text. Raises ValueError or TypeError."""
    if kind == "bool":
        return _boolean(value)
    if isinstance(value, bool) or (kind == "int" and isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    if kind == "int":
        return int(value)
    return float(value) if kind == "float" else str(value)


def _value(name: str, value: Any, where: str) -> Any:
    """`value` in the type of the setting. Raises ServeConfigInvalid."""
    kind = str(ServeConfig.__annotations__[name])
    if name == "tool_call_parser":
        return tool_parser(value, where)
    try:
        if kind.startswith("tuple"):
            parts = re.split(r"[\s,]+", value) if isinstance(value, str) else map(str, _list(value))
            return tuple(filter(None, parts))
        return Path(value) if kind.startswith("Path") else _parsed(kind, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ServeConfigInvalid(f"{where} must be a value of type {kind}, got {value!r:.80}") from error


def _boolean(value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(value)
    return words[str(value).lower()]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ServeConfigInvalid(f"a list was expected, got {value!r:.80}")
    return list(value)


def _model(entry: Any, where: str, overridden: Sequence[str]) -> ModelOptions:
    """An entry of `models`: a model, or a mapping of `model`, `name`, and arguments of `LLM`, without what is `overridden`."""
    options = {"model": entry} if isinstance(entry, str) else entry
    if not isinstance(options, Mapping) or not isinstance(options.get("model"), str):
        raise ServeConfigInvalid(f"{where}: an entry is a model, or a mapping with `model:`, got {entry!r:.80}")
    options = by_name(options, f"{where}: {options['model']}")
    known = [*_MODEL_KEYS, *ENGINE_OPTIONS]
    for name in options:
        if name not in known:
            raise ServeConfigInvalid(f"{where}: {options['model']}: {unknown_setting(name, known)}")
    options = {name: value for name, value in options.items() if name not in overridden}
    arguments = {name: value for name, value in options.items() if name not in _MODEL_KEYS}
    name = str(options.get("name") or options["model"])
    parser, template = tool_parser(options.get("tool_call_parser"), where), options.get("chat_template")
    return ModelOptions(name, options["model"], arguments, parser, template)


def tool_parser(given: Any, where: str) -> ToolParser | None:
    """A format of tool calls by its name. Raises ServeConfigInvalid."""
    for parser in TOOL_PARSERS:
        if given == parser:
            return parser
    if given is None:
        return None
    raise ServeConfigInvalid(f"{where}: tool_call_parser must be one of {', '.join(TOOL_PARSERS)}, got {given!r:.80}")
