"""The documentation site: settings of Sphinx, and the navigation.

    make docs

The sources are the Markdown files of the repository where they stand, so that their links work on a git host and on the
site. They have no tables of contents for Sphinx in them: NAVIGATION has the order, and is added as Sphinx reads.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).resolve().parents[1]
# The folders as they are installed, whether or not this checkout is.
sys.path[:0] = [str(ROOT / "src"), str(ROOT / ".ci")]

import index  # noqa: E402  # .ci/index.py

from pagetide import __version__  # noqa: E402

project = "pagetide"
version = release = __version__
root_doc = "README"
# What of the repository is a page. Links to other files of it are downloads.
include_patterns = ["*.md", "docs/**.md", "docs/**.rst", "engine/demo_model/README.md"]
# The package index shows docs/package.md, which says what README says.
exclude_patterns = ["build", "dist", ".*", "**/__pycache__", "docs/package.md"]

NAVIGATION = {
    "README": {
        "Guides": [
            "docs/getting-started",
            "docs/your-model",
            "docs/sharing",
            "docs/serve",
            "docs/clients",
            "docs/fleet",
            "docs/shards",
            "docs/page",
            "docs/run",
            "docs/quantization",
            "docs/migrating",
            "docs/monitor",
            "docs/gpu",
        ],
        "Reference": ["docs/api/index", "docs/settings", "docs/models", "docs/glossary", "docs/performance"],
        "Project": [
            "docs/architecture",
            "docs/decisions/README",
            "CHANGELOG",
            "CONTRIBUTING",
            "SECURITY",
            "engine/demo_model/README",
            "README.zh-CN",
        ],
    },
    "docs/decisions/README": {"": ["docs/decisions/0*"]},
}

FILES = "docs/api/files"  # the page with the index of files

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a heading may be skipped on a git host

# The reference is made without these: importing them takes longer than the rest of the site.
autodoc_mock_imports = ["torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "triton"]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
default_role = "py:obj"  # `name` in a docstring is a link where it names something of the reference
add_module_names = False

highlight_language = "none"  # of a block that names none: commands

html_title = f"pagetide {version}"
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False
html_copy_source = False
html_additional_pages = {"index": "home.html"}
templates_path = ["templates"]


def add_navigation(app: Sphinx, name: str, content: list[str]) -> None:
    """Append a page's tables of contents, and the index of files, to its source."""
    if name == FILES:
        content[0] += f"\n{index.index(ROOT)}"
    for caption, pages in NAVIGATION.get(name, {}).items():
        lines = ["", "", "```{toctree}", ":hidden:", ":glob:", *([f":caption: {caption}"] if caption else []), ""]
        content[0] += "\n".join([*lines, *(f"/{page}" for page in pages), "```", ""])


SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def preformatted(lines: list[str]) -> list[str]:
    """A docstring's lines with `::` before each indented block that no section begins: these are code or diagrams."""
    result: list[str] = []
    above = ""  # the nearest line that is not indented
    for line in lines:
        indented = line.startswith("  ")
        if indented and result and not result[-1] and not SECTION.match(above) and not above.startswith(("- ", "::")):
            result += ["::", ""]
            above = "::"
        elif line and not indented:
            above = line
        result.append(line)
    return result


def read_docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Turn a docstring's sections into fields. A property's first line is prose, not `type: description`."""
    kind = "method" if what in ("attribute", "data", "property") else what
    lines[:] = GoogleDocstring(preformatted(lines), Config(napoleon_use_rtype=False), what=kind, name=name).lines()


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", add_navigation)
    app.connect("env-get-outdated", lambda *_: [FILES])  # it depends on every module
    app.connect("autodoc-process-docstring", read_docstring)
