"""The rules of source_rules.py and text_rules.py find what is planted, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import source_rules
import text_rules

IMPORTS = [
    ("monitor/a.py", "from ..allocator import blocks", "never back"),
    ("allocator/a.py", "from ..cache.manager import CacheManager", "never back"),
    ("cache/a.py", "def f():\n    from ..scheduler import plan", "never back"),
    ("scheduler/a.py", "from .. import engine", "never back"),
    ("scheduler/deep/a.py", "from ...engine import llm", "never back"),
    ("configs/a.py", "from ..monitor import x", "never back"),
    ("scheduler/a.py", "import torch", "belong in engine/"),
    ("cache/manager.py", "def f():\n    from torch import Tensor", "belong in engine/"),
    ("allocator/a.py", "if TYPE_CHECKING:\n    import torch", "belong in engine/"),
    ("monitor/a.py", "import importlib\nimportlib.import_module('torch.cuda')", "belong in engine/"),
    ("monitor/a.py", "__import__('transformers')", "belong in engine/"),
    ("cache/a.py", "from safetensors.torch import load_file", "belong in engine/"),
    ("pagetide/a.py", "import torch", "belong in engine/"),
    ("cache/__init__.py", "from .storage import Storage", "which loads torch"),
    ("cache/manager.py", "from . import storage", "which loads torch"),
    ("cache/manager.py", "from importlib import import_module\nimport_module('.storage', __package__)", "loads torch"),
    ("scheduler/a.py", "from ..cache import storage", "which loads torch"),
    ("native/a.py", "from ..engine import errors", "never back"),
    ("scheduler/a.py", "from ..native import instructions", "never back"),
    ("engine/a.py", "from ..server import app", "never back"),
    ("server/a.py", "from ..engine.llm import LLM", "which loads torch"),
    ("server/a.py", "from .engine_process import load", "which loads torch"),
    ("engine/a.py", "from pagetide.cache import manager", "write it with dots"),
    ("engine/a.py", "import pagetide.cache.manager", "write it with dots"),
    ("cache/a.py", "from allocator.blocks import BlockAllocator", "write it with dots"),
    ("pagetide/cli.py", "from pagetide.engine.llm import LLM", "write it with dots"),
    ("engine/a.py", "from .. import cli", "composition root"),
    ("engine/a.py", "from ..vram_monitor import main", "composition root"),
    ("pagetide/__init__.py", "def f():\n    from .cli import main", "composition root"),
    ("pagetide/cli.py", "from . import vram_monitor", "composition root"),
    ("engine/a.py", "from .. import LLM", "of pagetide itself"),
    ("engine/a.py", "from .. import __version__", "of pagetide itself"),
    ("pagetide/__init__.py", "from .engine.llm import LLM", "imports lazily"),
    ("pagetide/__init__.py", "import numpy", "imports lazily"),
    ("engine/a.py", "from .... import x", "leaves the package"),
]

ALLOWED_IMPORTS = [
    ("engine/a.py", "import torch, transformers, triton\nfrom ..cache.storage import Storage\nfrom . import b"),
    ("engine/attention/a.py", "import torch\nfrom ... import native\nfrom ...cache import storage\nfrom ..runner import A"),
    ("engine/torch_kernel.py", "from .torch_sampler import sample"),
    ("cache/storage.py", "import torch\nfrom ..allocator.arena import Arena\nfrom .geometry import Geometry"),
    ("scheduler/a.py", "import numpy as np\nfrom ..cache.manager import CacheManager\nfrom ..monitor import snapshot"),
    ("engine/__init__.py", "from ..version import __version__"),
    ("pagetide/cli.py", "import torch\nfrom .engine.llm import LLM\nfrom .version import a\nfrom .cache import storage"),
    ("pagetide/__main__.py", "from .cli import main"),
    ("pagetide/__init__.py", "if TYPE_CHECKING:\n    from .engine.llm import A\ndef f():\n    from .engine import llm"),
]


def plant(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


@pytest.mark.parametrize(("path", "text", "said"), IMPORTS)
def test_a_planted_violation_is_reported_once_with_its_line(tmp_path: Path, path: str, text: str, said: str) -> None:
    plant(tmp_path, path, text)
    (report,) = source_rules.violations(tmp_path)
    assert report.startswith(f"{path}:{len(text.splitlines())}: ")
    assert said in report


@pytest.mark.parametrize(("path", "text"), ALLOWED_IMPORTS)
def test_what_is_allowed_is_not_reported(tmp_path: Path, path: str, text: str) -> None:
    plant(tmp_path, path, text)
    assert source_rules.violations(tmp_path) == []


def test_another_way_to_start_a_process_is_reported(tmp_path: Path) -> None:
    lines = (
        "import subprocess",
        "from multiprocessing import Process",
        "import os",
        "os.getpid()",
        "a = os.fork",
        "os.popen('b')",
    )
    plant(tmp_path, "cache/a.py", "\n".join(lines))
    plant(tmp_path, "common/child_process.py", "\n".join(lines))
    found = [(1, "subprocess"), (2, "multiprocessing.Process"), (5, "os.fork"), (6, "os.popen")]
    assert source_rules.process_starts(tmp_path) == [f"cache/a.py:{line}: {name}" for line, name in found]


@pytest.mark.parametrize(
    "files",
    [
        {"cache/a.py": "from .b import B", "cache/b.py": "def f():\n    from .a import A"},
        {"cache/a.py": "from . import b", "cache/b.py": "if TYPE_CHECKING:\n    from .a import A"},
        {"cache/a.py": "from . import b", "cache/b.py": "from .deep.c import C", "cache/deep/c.py": "from ..a import A"},
    ],
)
def test_a_planted_cycle_is_reported(tmp_path: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        plant(tmp_path, path, text)
    plant(tmp_path, "cache/outside.py", "from . import a")
    names = sorted("pagetide." + path.removesuffix(".py").replace("/", ".") for path in files)
    assert source_rules.cycles(tmp_path) == [names]


@pytest.mark.parametrize(
    ("path", "text", "breaches"),
    [
        ("sampling/a.py", "from ..execution.runner import A", ["sampling/a.py:1: sampling imports execution"]),
        ("sampling/a.py", "from .. import core", ["sampling/a.py:1: sampling imports core"]),
        ("core.py", "def f():\n    from .requests import manager", ["core.py:2: core imports requests"]),
        ("memory/a.py", "if TYPE_CHECKING:\n    from ..core import x", ["memory/a.py:2: memory imports core"]),
        ("memory/a.py", "from ..novelty import x", ["memory/a.py:1: memory imports novelty"]),
        ("requests/a.py", "from ..core import x\nfrom .b import y\nfrom ...cache import z\nfrom . import c", []),
    ],
)
def test_a_planted_upward_import_is_found(tmp_path: Path, path: str, text: str, breaches: list[str]) -> None:
    plant(tmp_path, path, text)
    assert source_rules.upward_imports(tmp_path) == breaches


def test_a_planted_second_class_is_found(tmp_path: Path) -> None:
    for folder in ("cache", "engine"):
        plant(tmp_path, f"{folder}/a.py", "class Block:\n    pass\n")
    assert source_rules.repeated_class_names(tmp_path) == {"Block": ["cache/a.py", "engine/a.py"]}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llm._desk.lock", "llm._desk"),
        ("self.llm._desk", "self.llm._desk"),
        ("core.runner._compute = None", "core.runner._compute"),
        ("from pagetide.engine.execution.runner import Runner, _Computed", "_Computed"),
        ("from pagetide._inner import a", "_inner"),
        ("import pagetide._inner", "pagetide._inner"),
        ("getattr(llm, '_manager')", "_manager"),
        ("mock.patch.object(runner, '_compute')", "_compute"),
        ("def f():\n    class A:\n        x = lambda y: y()._z", "y()._z"),
    ],
)
def test_a_planted_private_name_is_reported_with_its_line(tmp_path: Path, text: str, name: str) -> None:
    plant(tmp_path, "benchmarks/deep/a.py", "import math\n" + text)
    assert source_rules.private_uses(tmp_path) == [f"benchmarks/deep/a.py:{1 + len(text.splitlines())}: {name}"]


@pytest.mark.parametrize(
    "text", ["self._own = cls._shared", "a.__class__", "from __future__ import annotations", "getattr(a, 'b')", "_local = 1"]
)
def test_what_is_ones_own_is_not_reported(tmp_path: Path, text: str) -> None:
    plant(tmp_path, "examples/a.py", text)
    assert source_rules.private_uses(tmp_path) == []


def test_a_machine_path_is_seen_and_other_paths_are_not() -> None:
    for path in ("/" + "home/me/x", "`/" + "root/.cache`", "at /" + "work/x", "/" + "Users/me/x"):
        assert text_rules.MACHINE_PATH.search(path), path
    for path in ("/run/pagetide", "https://example.org/home/x", "docs/" + "work/x", "home/x", "a/" + "root/b"):
        assert not text_rules.MACHINE_PATH.search(path), path


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(
        "# The first `one`: a, b\n[a](a.md) [b](gone.md#x) [c](https://example.org/c) [d](#the-first-one-a-b)\n"
        "```\n[e](code.md)\n```\n[f](#f) `[g](g.md)` ![h](h.png) [i](a.md#the-first-one)\n"
    )
    assert text_rules.dead_links(document) == ["a.md: gone.md#x", "a.md: #f", "a.md: h.png", "a.md: a.md#the-first-one"]


def test_planted_words_are_found(tmp_path: Path) -> None:
    plant(tmp_path, "cache/a.py", "# A block that nobody holds.\n# The whole block.\n# Whose block?")
    plant(tmp_path, "README.md", "whom it may concern")
    assert text_rules.person_words(tmp_path) == ["README.md:1: whom", "cache/a.py:1: nobody", "cache/a.py:3: Whose"]
