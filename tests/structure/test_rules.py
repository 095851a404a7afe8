"""The rules of the repository hold: imports, layers, names, words, links (source_rules.py, text_rules.py)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import source_rules
import text_rules
from checkout import ROOT, files

# Each file is parsed once in a process.
pytestmark = pytest.mark.xdist_group("source_rules")


@pytest.mark.parametrize(
    "rule", ["violations", "cycles", "process_starts", "repeated_class_names", "wide_constructors", "private_uses"]
)
def test_the_source_keeps_its_rules(rule: str) -> None:
    assert not getattr(source_rules, rule)(ROOT)


def test_the_engine_has_an_order() -> None:
    assert source_rules.upward_imports(ROOT / "engine") == []
    entries = (ROOT / "engine").iterdir()
    parts = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} == source_rules.PLACE.keys()


def test_every_package_is_looked_at_and_every_exception_is_used() -> None:
    looked_at = {name.split(".")[1] for name, _ in source_rules.sources(ROOT) if name.count(".") > 1}
    assert looked_at == {*source_rules.ORDER, "batch", "demo", "pipelines"}
    trees = (tree for _, tree in source_rules.modules(ROOT, source_rules.TOOLS))
    assert {name for tree in trees for _, name in source_rules.private_names(tree)} == source_rules.USED_OF_OTHERS


def test_few_handlers_catch_everything() -> None:
    """What may raise anything runs in an `Attempt`, and what is undone on an error is given to `OnError`."""
    handlers = [
        f"{path}:{node.lineno}"
        for path, tree in source_rules.modules(ROOT, (*source_rules.ORDER, "pagetide"))
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and (node.type is None or "BaseException" in ast.unparse(node.type))
    ]
    assert len(handlers) <= 10, handlers


def test_words_for_persons_are_rare() -> None:
    found = text_rules.person_words(ROOT)
    assert len(found) <= text_rules.MOST_PERSONS, "\n".join(found)


def test_no_file_is_huge_names_a_machine_or_is_left_half_done() -> None:
    assert [str(path) for path in files() if path.stat().st_size > text_rules.LARGEST_BYTES] == []
    # A tokenizer's vocabulary may hold anything.
    readable = [path for path in files() if path.suffix != ".json" and path.name != "LICENSE"]
    assert text_rules.found(text_rules.MACHINE_PATH, readable) == []
    assert text_rules.found(text_rules.LEFT_OVER, filter(text_rules.is_code, files())) == []


def test_every_local_link_resolves() -> None:
    documents = [path for path in files() if path.suffix == ".md"]
    assert documents
    assert [link for document in documents for link in text_rules.dead_links(document)] == []


def loaded_by(code: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `code`."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


def test_pure_modules_do_not_load_torch() -> None:
    names = ("scheduler.scheduler", "cache.manager", "allocator.blocks", "fleet.actors")
    imports = "; ".join(f"import pagetide.{name}" for name in names)
    # A public name loads its own module only; test_public_names.py asks for those that load transformers.
    loaded = loaded_by(f"{imports}; assert pagetide.SamplingParams.__name__ == 'SamplingParams'")
    assert loaded.isdisjoint({"torch", "transformers"})


def test_what_can_be_said_without_torch_is_said_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("models: [{model: demo, max_sqs: 4}]\n")
    (tmp_path / "fleet.yaml").write_text("model: lama\n")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128, **sizes}))
    code = f"""
from pagetide import AsyncLLM, LLM
from pagetide.cli import main
serve, batch = ["serve", "--config", {str(tmp_path / "serve.yaml")!r}], ["run", "--input", "in.txt", "--output", "out"]
fleet = ["fleet", "start", "--config", {str(tmp_path / "fleet.yaml")!r}]
for command in (["serve", "lama"], ["serve", "demo", "--kv-memory", "lots"], ["serve", {str(tmp_path)!r}], serve, fleet,
                [*batch, "--model", "lama"], ["generate", "--model", "lama", "--prompt", "x"], ["plan", "lama"],
                ["serve", "--fleet", "local", "--fleet-name", "nowhere"], [*batch, "--fleet", "local"]):
    assert main(command) == 2, command
for command in (["plan", {str(file.parent)!r}], ["plan", "--config", {str(file)!r}, "--device", "rtx4090"],
                ["plan", "demo", "--memory", "24GiB", "--json"]):
    assert main(command) == 0, command
for make in (lambda: LLM("lama"), lambda: AsyncLLM("demo", max_sqs=4), lambda: LLM("demo", kv_memory="lots")):
    try:
        make()
    except Exception as error:
        assert type(error).__name__ in ("ModelNotFound", "UnknownArgument", "ConfigError")
"""
    assert loaded_by(code).isdisjoint({"torch", "transformers"})


def test_pagetide_itself_loads_nothing_but_the_standard_library() -> None:
    # What the interpreter loads for itself, such as the finder of an editable install, is not pagetide's doing.
    assert loaded_by("import pagetide") - loaded_by("") - sys.stdlib_module_names == {"pagetide"}


def test_no_module_has_the_name_of_a_folder_beside_it() -> None:
    code = [path for path in files() if path.suffix == ".py"]
    assert [str(path) for path in code if path.with_suffix("").is_dir()] == []
