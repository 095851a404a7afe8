"""Resolves a model's name to its folder: the models file, a path, or a hub id in the local cache. Never uses the network.

A models file is YAML with entries `name: path` or `name: {path: ..., dtype: ..., ...}` (see `configs/models.yaml`). Entries of
the user's file override built-in ones, and those of the file that PAGETIDE_CONFIG names override both.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from ... import configs
from ...api.arguments import answer
from ...api.sampling_params import ALIASES, SamplingParams
from ...cache.geometry import ITEM_BYTES
from ...common.state_dir import user_dir
from ...common.units import format_bytes
from ...common.yaml_file import InvalidYaml, read_yaml
from ..attention.backends import NAMES as ATTENTION
from ..errors import CheckpointError, ConfigError, EngineError, ModelNotFound
from ..layers import Quantization
from .gguf.file import is_gguf, models_in, read_gguf
from .gguf.models import family_of
from .weight_files import find_weights, stored_bytes
from .written_model import WrittenModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .loaded import Loaded

log = logging.getLogger(__name__)

CONFIG_VARIABLE = "PAGETIDE_CONFIG"
BUILT_IN_FILE = Path(configs.__file__ or "").with_name("models.yaml")
FOLDER_FILE = Path("configs/model_paths.yaml")  # in the current folder

# Any of these marks a folder as having a tokenizer; the tokenizer checks which ones it needs.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "merges.txt", "tiktoken.model",
)  # fmt: skip
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
KvCacheDtype = Literal["auto", "int8", "fp8"]
KV_CACHE_DTYPES: tuple[KvCacheDtype, ...] = get_args(KvCacheDtype)
_DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}  # torch's and vLLM's
_ENTRY_KEYS = ("path", "dtype", "device", "tokenizer", "trust_remote_code", "sampling", "attention")
# Not a model default: fields without an "unset" value, or that belong to one request.
_OF_A_REQUEST = ("ignore_eos", "seed", "add_special_tokens")
_SAMPLING_KEYS = (*(f.name for f in fields(SamplingParams) if f.name not in _OF_A_REQUEST), *ALIASES)
MOST_LISTED_KEYS = 8  # in an error about others
IN_CACHE = "the local hub cache"  # the source of a hub id
_NOT_TOKENIZER_OPTIONS = ("local_files_only", "trust_remote_code", "force_download", "cache_dir", "token", "revision")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# A hub id, and behind a colon the quantization of one of its GGUF files, as llama.cpp and Ollama spell it.
_HUB_ID = re.compile(r"(?:hf\.co/|huggingface\.co/)?([\w][\w.-]*(?:/[\w][\w.-]*)?)(?::([\w.-]+))?", re.ASCII)
_USUAL_KIND = "Q4_K_M"  # of GGUF files, where none is named


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's location and loading options. None means: as the checkpoint or the machine determines.

    For an already loaded model, `loaded` is set and `path` is only its stated origin. `tokenizer_from` is another folder of the
    tokenizer, or the tokenizer itself. `sampling` holds only the models file's defaults; those of `generation_config.json` are
    in `Checkpoint`.
    """

    name: str  # as requested by the user
    path: Path  # a folder with a configuration and weights, or a GGUF file
    source: str  # origin: "configs/models.yaml:3", "a folder", "the local hub cache"
    dtype: str | None = None
    device: str | None = None
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tokenizer_from: Path | PreTrainedTokenizerBase | None = None
    loaded: Loaded | None = None
    attention: str | None = None

    @property
    def config_file(self) -> Path:
        """The file that has the configuration."""
        return self.path if is_gguf(self.path) else self.path / "config.json"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One validated entry of a models file."""

    name: str
    path: str  # as written
    file: Path
    line: int  # from 1
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelSpec

    @property
    def where(self) -> str:
        """File and line of the entry."""
        return f"{self.file}:{self.line}"

    def resolve(self, cache_dir: Path | None = None, *, needs_weights: bool = True) -> ModelSpec:
        """The entry's model, as `resolve_model`. Raises ModelNotFound if its folder or hub id is not on this machine."""
        written = os.path.expanduser(os.path.expandvars(self.path))
        try:
            folder, there = _looked_for(os.path.normpath(self.file.parent / written))
            if not there and _HUB_ID.fullmatch(self.path):
                cached = _cached_folder(self.path, cache_dir, needs_weights)
                if cached is None:
                    raise ModelNotFound(
                        f"there is no folder {folder}, and {self.path} is not in the local hub cache either; correct "
                        f"the path{_fetch_advice(self.path)}"
                    )
                folder = cached
            else:
                check_folder(folder, needs_weights)
        except (ModelNotFound, CheckpointError) as error:
            raise type(error)(f"model {self.name!r} ({self.where}): {error}") from error
        return ModelSpec(self.name, folder, self.where, **self.options)


def resolve_model(reference: str | os.PathLike[str], *, cache_dir: Path | None = None, needs_weights: bool = True) -> ModelSpec:
    """The model for `reference`: a name of the models files, else a folder or a GGUF file, else a hub id in the local cache.

    Of a repository of GGUF files, `owner/name:Q5_K_M` names one; `owner/name` is its only one, or that of Q4_K_M.
    A `Path`, or a text that starts like one (`/`, `./`, `../`, `~`), can only be a folder or a file. `cache_dir` replaces the
    default hub cache (HF_HOME, HF_HUB_CACHE). Without `needs_weights` its configuration has to be here alone.

    Raises:
        ModelNotFound: nothing of that name is here; lists the known names and the command to fetch it.
        ConfigError: a models file is invalid.
        CheckpointError: an index of weights cannot be read.
    """
    text = os.fspath(reference)
    if not text:
        raise ModelNotFound(f"the model's name is empty; {_known_names(read_models())}")
    path_only = not isinstance(reference, str) or text.startswith(("/", "./", "../", "~"))
    entries = {} if path_only else read_models()
    if text in entries:
        return entries[text].resolve(cache_dir, needs_weights=needs_weights)
    folder, there = _looked_for(text)
    if there:
        check_folder(folder, needs_weights)
        return ModelSpec(text, folder.absolute(), "a GGUF file" if folder.is_file() else "a folder")
    if path_only:
        raise ModelNotFound(f"there is no folder {folder.absolute()}; name the folder that holds the model's config.json")
    is_hub_id = _HUB_ID.fullmatch(text) is not None
    cached = _cached_folder(text, cache_dir, needs_weights) if is_hub_id else None
    if cached is not None:
        return ModelSpec(text, cached, IN_CACHE)
    repository = ", nor a repository in the local hub cache" if is_hub_id else ""
    near = difflib.get_close_matches(text, [*entries, *_cached_ids(cache_dir)], n=1)
    meant = f" - did you mean {near[0]}?" if near else ";"
    raise ModelNotFound(
        f"{text!r:.200} is neither a known name nor a folder{repository}{meant} {_known_names(entries)}{_fetch_advice(text)}"
    )


def resolve_tokenizer(reference: str | os.PathLike[str], *, cache_dir: Path | None = None) -> Path:
    """The folder or GGUF file of the tokenizer for `reference`, found as `resolve_model` finds a model.

    Raises ModelNotFound if there is none; ConfigError, CheckpointError as `resolve_model` does.
    """
    text = os.fspath(reference)
    path_only = not isinstance(reference, str) or text.startswith(("/", "./", "../", "~"))
    entries = {} if path_only else read_models()
    folder, there = (entries[text].resolve(cache_dir).path, True) if text in entries else _looked_for(text)
    if not there and not path_only and (named := _HUB_ID.fullmatch(text)):
        own = _cached_tokenizer(named[1], cache_dir) if named[2] is None else None
        folder = own or _cached_folder(text, cache_dir, False) or folder
    if not is_gguf(folder) and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelNotFound(
            f"there is no tokenizer {text!r:.200}: {folder.absolute()} has none of {', '.join(TOKENIZER_FILES)}; name a known "
            f"model, the folder that holds the tokenizer, or a hub id in the local cache"
        )
    return folder


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's models file: $XDG_CONFIG_HOME/pagetide/models.yaml, by default in ~/.config. Need not exist."""
    return user_dir("config", environ) / "models.yaml"


def _is_present(file: Path) -> bool:
    """Whether the user's file is there. A folder that this process may not search, as another user's home, has none."""
    if not file.is_absolute():  # there is no home directory
        return False
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that leads back to itself: reading it says so
            return True
        log.debug("no models file is looked for at %s: %s", file, error)
        return False
    return True


def models_files(file: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """The models files to read, by their role; a later one overrides earlier ones. `file` replaces PAGETIDE_CONFIG."""
    found = {"built-in": BUILT_IN_FILE}
    if _is_present(user_file()):
        found["user"] = user_file()
    if FOLDER_FILE.is_file():
        found["folder"] = FOLDER_FILE.absolute()
    named = file or os.environ.get(CONFIG_VARIABLE, "").strip()
    if named:
        found["argument" if file else CONFIG_VARIABLE] = Path(named).expanduser().absolute()
    return found


def read_models(file: str | os.PathLike[str] | None = None) -> dict[str, ModelEntry]:
    """All named models: the built-in ones, the user's, those of `configs/model_paths.yaml` in the current folder, and those of
    `file` (default: the file that PAGETIDE_CONFIG names).

    A later file overrides an earlier one, entry by entry. Raises ConfigError with file and line for invalid content.
    """
    entries: dict[str, ModelEntry] = {}
    for role, path in models_files(file).items():
        entries |= read_models_file(role, path)
    return entries


def read_models_file(role: str, file: Path) -> dict[str, ModelEntry]:
    """The models that one file names; `role` as in `models_files`. Raises ConfigError with file and line."""
    try:
        document, content = read_yaml(file)
    except InvalidYaml as error:
        raise ConfigError(str(error)) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        said = f" {CONFIG_VARIABLE} names it:" if role == CONFIG_VARIABLE else ""
        raise ConfigError(f"there is no models file {file};{said} correct the path, or unset it") from error
    except OSError as error:
        raise ConfigError(f"the models file {file} cannot be read: {error.strerror or error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(document, yaml.MappingNode):
        raise ConfigError(f"{file}: must hold `name: path` entries, got {type(content).__name__}")
    entries = _keys(file, document)
    for name, line in entries if role == "folder" else ():  # a folder of others may not run code, for one
        if not isinstance(content[name], str):
            raise ConfigError(f"{file}:{line}: may hold `name: path` entries alone, got {content[name]!r:.80} for {name!r}")
    return {name: _entry(name, content[name], file, line) for name, line in entries}


def loaded_spec(model: object) -> ModelSpec:
    """The `ModelSpec` of a loaded model, with the model's device and type.

    Raises what `Loaded.of` raises.
    """
    from .loaded import Loaded  # imports torch, as the loaded model has already

    loaded = Loaded.of(model)
    own = loaded.model
    origin, dtype = str(own.name_or_path), str(own.dtype).removeprefix("torch.")
    try:
        tokenizer = resolve_tokenizer(Path(origin) if Path(origin).exists() else origin) if origin else None
    except ModelNotFound:
        tokenizer = None  # the model's tokenizer is unknown
    return ModelSpec(
        name=origin or type(own).__name__,
        path=Path(origin or type(own).__name__),
        source="a loaded model",
        tokenizer_from=tokenizer,
        dtype=dtype if dtype in DTYPES else None,
        device=str(own.device),
        loaded=loaded,
    )


def _looked_for(text: str) -> tuple[Path, bool]:
    """`text` as a path, and whether it exists. Raises ModelNotFound if the system cannot tell."""
    try:
        folder = Path(text).expanduser()
        return folder, folder.exists()
    except (OSError, RuntimeError) as error:  # too long, not allowed, or the home of an unknown user
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFound(
            f"{text!r:.200} cannot be looked for as a folder: {why}; name a known model, a folder or a hub id"
        ) from error


def check_folder(folder: Path, needs_weights: bool = True) -> None:
    """Raises ModelNotFound unless `folder` has a configuration and, if it `needs_weights`, all its weight files.

    Of a GGUF file, raises CheckpointError or UnsupportedModel unless its header is of a model that is served.
    """
    if not folder.exists():
        raise ModelNotFound(f"there is no folder {folder}")
    if is_gguf(folder):
        family_of(read_gguf(folder))
        return
    has_config = (folder / "config.json").is_file()
    if folder.is_dir() and not has_config and (files := sorted(folder.glob("*.gguf"))):
        raise ModelNotFound(f"{folder} has GGUF files: name one of them, as in {files[0]}")
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is a file; name the folder that holds it, its config.json and its tokenizer")
    if not has_config:
        raise ModelNotFound(
            f"{folder} has no config.json, so it is no model saved by transformers; name the folder that has it"
        )
    if needs_weights:
        find_weights(folder)


def fetch_command(hub_id: str) -> str:
    """The command that fetches `hub_id` into the local cache (huggingface_hub >= 0.34): of GGUF files one quantization."""
    named = _HUB_ID.fullmatch(hub_id)
    name, kind = (hub_id, None) if named is None else named.groups()
    kind = kind or (_USUAL_KIND if name.lower().endswith("gguf") else None)
    return f"hf download {name}" + (f' --include "*{kind}*"' if kind else "")


def _fetch_advice(text: str) -> str:
    """How to fetch a model from the hub, if this may be the name of one, after a semicolon."""
    if (named := _HUB_ID.fullmatch(text)) is None:
        return ""
    if "/" not in named[1]:
        return "; a model of the Hugging Face hub goes by its owner and name, as in Qwen/Qwen3-0.6B"
    return (
        f"; if it is a model of the Hugging Face hub, fetch it first with: {fetch_command(text)} (a gated one: accept its "
        f"terms on https://huggingface.co/{named[1]}, then log in with: hf auth login)"
    )


def _cached_ids(cache_dir: Path | None) -> list[str]:
    """The ids of the models of which the local hub cache has something."""
    from huggingface_hub import constants

    folders = Path(cache_dir or constants.HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def _cached_folder(text: str, cache_dir: Path | None, needs_weights: bool) -> Path | None:
    """The snapshot of a hub id's main branch in the hub cache, or one of its GGUF files, or None. Reads only local files.

    `snapshot_download(local_files_only=True)` would reject a snapshot without a README. Raises ModelNotFound if the weights are
    missing, with their size if it is known.
    """
    named = _HUB_ID.fullmatch(text)
    snapshot = None if named is None else _snapshot(named[1], cache_dir)
    if named is None or snapshot is None:
        return None
    hub_id, kind = named.groups()
    folder = _gguf_of(snapshot, hub_id, kind) or snapshot
    if folder == snapshot and not (snapshot / "config.json").is_file():
        return None
    try:
        check_folder(folder, needs_weights)
    except ModelNotFound as error:
        size = _weights_bytes(snapshot) if folder == snapshot else None
        rest = "the rest" if size is None else f"the rest, {format_bytes(size)} of weights in all,"
        raise ModelNotFound(
            f"{hub_id} is in the local hub cache, but not all of it; fetch {rest} with: {fetch_command(text)} ({error})"
        ) from error
    return folder


def _weights_bytes(folder: Path) -> int | None:
    """Bytes of a folder's weights, by their index or by its configuration, whether they are here or not; None if unknown."""
    if (size := stored_bytes(folder)) is not None:
        return size
    try:
        model = WrittenModel.read(ModelSpec(folder.name, folder, IN_CACHE), folder / "config.json")
    except EngineError:
        return None
    return None if model.stored_as is not None else model.num_parameters * ITEM_BYTES[model.dtype]


def _snapshot(hub_id: str, cache_dir: Path | None) -> Path | None:
    """The snapshot of `hub_id`'s main branch in the hub cache, which may have a part of its files; None if it is not there."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(hub_id)
        repository = Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model")
        folder = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (HFValidationError, OSError, UnicodeDecodeError):
        return None
    return folder if folder.parent == repository / "snapshots" and folder.is_dir() else None


def _gguf_of(snapshot: Path, hub_id: str, kind: str | None) -> Path | None:
    """The GGUF file in a snapshot that is meant; None if the repository is none of GGUF files. Raises ModelNotFound."""
    models = models_in(snapshot)
    if kind is None and any(itertools.chain(snapshot.glob("*.safetensors*"), snapshot.glob("*.bin"))):
        return None
    by_kind = {re.split(r"[-.]", name)[-1]: file for name, file in models.items()}
    listed = ", ".join(sorted(by_kind))
    if kind is not None:
        ending = re.compile(rf"(?:.*[-._])?{re.escape(kind)}", re.IGNORECASE | re.DOTALL)
        found = next((file for name, file in models.items() if ending.fullmatch(name)), None)
        if found is None:
            there = f"GGUF files of {listed}" if models else "no GGUF files"
            raise ModelNotFound(
                f"{hub_id} is in the local hub cache with {there}, and {kind} is none of them; fetch it with: "
                f"{fetch_command(f'{hub_id}:{kind}')}"
            )
        return found
    if len(models) > 1 and _USUAL_KIND not in by_kind:
        raise ModelNotFound(f"{hub_id} has GGUF files of {listed} here: name one of them, as in {hub_id}:{min(by_kind)}")
    return by_kind.get(_USUAL_KIND) or next(iter(models.values()), None)


def _cached_tokenizer(hub_id: str, cache_dir: Path | None) -> Path | None:
    """The snapshot of `hub_id`'s main branch that has a tokenizer, or None. Reads only local files."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(hub_id, name, cache_dir=cache_dir) for name in TOKENIZER_FILES]
    except HFValidationError:
        return None
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def _known_names(entries: Mapping[str, ModelEntry]) -> str:
    by_file: dict[Path, list[str]] = {}
    for entry in entries.values():
        by_file.setdefault(entry.file, []).append(entry.name)
    known = "; ".join(f"{file} names {', '.join(sorted(names))}" for file, names in by_file.items())
    own = bool(os.environ.get(CONFIG_VARIABLE, "").strip()) or _is_present(user_file())
    return known if own else f"{known} (add your own to {user_file()}, or to a file that {CONFIG_VARIABLE} names)"


def _keys(file: Path, node: yaml.MappingNode) -> list[tuple[str, int]]:
    """The keys of a mapping and their lines. Keys must be text."""
    keys: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str" or not key.value:
            raise ConfigError(f"{file}:{line}: a name must be text, got {key.value!r:.80}; put it in quotes")
        keys[key.value] = line
        if isinstance(value, yaml.MappingNode):
            _keys(file, value)
    return list(keys.items())


def _entry(name: str, value: object, file: Path, line: int) -> ModelEntry:
    where = f"{file}:{line}"
    if isinstance(value, str) and value.strip():
        return ModelEntry(name, value.strip(), file, line)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}: model {name!r} must be a path, or a mapping of {', '.join(_ENTRY_KEYS)}; got {value!r:.80}"
        )
    _refuse_unknown(value, _ENTRY_KEYS, f"{where}: model {name!r}")
    path = value.get("path")
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{where}: model {name!r} needs a `path`: a folder, or a hub id in the local cache; got {path!r:.80}")
    try:
        return ModelEntry(name, path.strip(), file, line, _options(value))
    except ValueError as error:
        raise ConfigError(f"{where}: model {name!r}: {error}") from error


def _options(value: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if value.get("dtype") is not None:
        options["dtype"] = check_dtype(value["dtype"])
    if value.get("device") is not None:
        options["device"] = check_device(value["device"])
    if value.get("attention") is not None:
        options["attention"] = check_attention(value["attention"])
    trust = value.get("trust_remote_code", False)
    if not isinstance(trust, bool):
        raise ValueError(f"trust_remote_code must be true or false, got {trust!r:.80}")
    tokenizer, sampling = value.get("tokenizer") or {}, value.get("sampling") or {}
    if not isinstance(tokenizer, dict) or any(not isinstance(key, str) for key in tokenizer):
        raise ValueError(f"tokenizer must map options of AutoTokenizer.from_pretrained to values, got {tokenizer!r:.80}")
    fixed = [key for key in _NOT_TOKENIZER_OPTIONS if key in tokenizer]
    if fixed:
        raise ValueError(f"tokenizer option {fixed[0]!r} is not free: files are local, and trust_remote_code is the model's")
    if not isinstance(sampling, dict):
        raise ValueError(f"sampling must map arguments of SamplingParams to values, got {sampling!r:.80}")
    for key in sampling:
        if key in _OF_A_REQUEST:
            raise ConfigError(f"sampling: unknown key {key!r}: it belongs to a request, not to a model")
        if key not in _SAMPLING_KEYS and (said := answer("SamplingParams", str(key))) is not None:
            raise ConfigError(f"sampling: unknown key {key!r:.80}: {said}")
    _refuse_unknown(sampling, _SAMPLING_KEYS, "sampling")
    given: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in sampling.items()}
    return options | {"trust_remote_code": trust, "tokenizer": dict(tokenizer), "sampling": SamplingParams(**given)}


def _refuse_unknown(given: Mapping[Any, Any], known: tuple[str, ...], what: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), known, n=1)
        listed = f"; the known ones are {', '.join(known)}" if len(known) <= MOST_LISTED_KEYS else ""
        meant = f"; did you mean {near[0]!r}?" if near else listed
        raise ConfigError(f"{what}: unknown key {unknown[0]!r:.80}{meant}")


def check_dtype(dtype: object) -> str:
    """The name of `dtype`, a name or a torch dtype. Raises ConfigError for an unsupported one."""
    name = str(dtype).removeprefix("torch.")
    name = _DTYPE_SYNONYMS.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.80}")
    return name


def check_attention(attention: object) -> str:
    """The name of an attention backend, or "auto". Raises ConfigError for an unknown one."""
    if attention not in ATTENTION:
        raise ConfigError(f"attention must be one of {', '.join(ATTENTION)}, got {attention!r:.80}")
    return str(attention)


def check_quantization(quantization: object) -> Quantization | None:
    """The form of quantized weights, or None. Raises ConfigError for an unknown one."""
    if quantization is None or quantization in QUANTIZATIONS:
        return quantization
    raise ConfigError(f"quantization must be {', '.join(QUANTIZATIONS)} or None, got {quantization!r:.80}")


def check_kv_cache_dtype(dtype: object) -> KvCacheDtype:
    """The type of K and V in the cache; None is "auto". Raises ConfigError for an unknown one."""
    if dtype is None:
        return "auto"
    for known in KV_CACHE_DTYPES:
        if dtype == known:
            return known
    raise ConfigError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {dtype!r:.80}")


def check_device(device: object) -> str:
    """The name of `device`, a name or a torch device. Raises ConfigError for an invalid name."""
    name = str(device)
    if not _DEVICE.fullmatch(name):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N (cuda:0, cuda:1, ...), got {device!r:.80}")
    return name
