"""How Sphinx builds the site: sh scripts/docs.sh"""

import ast
import re
from pathlib import Path
from typing import Any, List

import gluon_mgpu
from gluon_mgpu.known_errors import entries

project = "gluon_mgpu"
release = gluon_mgpu.__version__
copyright = "the authors of gluon_mgpu, Apache-2.0"

# The sources are the repository itself, so that links between pages work here and in the repository.
root_doc = "docs/index"
include_patterns = ["README*.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "notebooks/**", "scripts/benchmarks/RESULTS.md"]
exclude_patterns = [".venv", "build"]

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the test command runs the notebooks
suppress_warnings = ["myst.xref_ambiguous"]

autodoc_typehints = "none"  # the docstrings give types, with shapes and units
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
default_role = "py:obj"
autosummary_generate = False  # numpydoc loads autosummary, whose pages nothing needs

html_theme = "furo"
html_title = f"gluon_mgpu {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_style = "default"
pygments_dark_style = "monokai"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e6e", "color-brand-content": "#0b6e6e"},
    "dark_css_variables": {"color-brand-primary": "#5cc8c0", "color-brand-content": "#5cc8c0"},
}


def indent_fences(app: Any, what: str, name: str, obj: Any, options: Any, lines: List[str]) -> None:
    """Turn what docstrings fence with ``` into literal blocks of reStructuredText."""
    found: List[str] = []
    inside = False
    for line in lines:
        if line.strip() == "```":
            inside = not inside
            found += ["::", ""] if inside else [""]
        else:
            found.append("    " + line if inside else line)
    lines[:] = found


def fill_lists(app: Any, docname: str, source: List[str]) -> None:
    """Put the list of modules, and that of error messages, into their pages."""
    if "<!-- modules -->" in source[0]:
        source[0] = source[0].replace("<!-- modules -->", table_of_modules())
    if "<!-- messages -->" in source[0]:
        is_korean = "/ko/" in docname
        tables = tables_of_messages("ko" if is_korean else "en")
        source[0] = source[0].replace("<!-- messages -->", re.sub(r"\]\((?!https:)", "](../", tables) if is_korean else tables)


def tables_of_messages(language: str) -> str:
    """Return a table for each group of the messages that `gluon-mgpu explain` knows, with the likeliest remedy."""
    lines = []
    for group in dict.fromkeys(entry.group for entry in entries()):
        lines += ["", f"## {group}", "", "| message | cause | likeliest remedy |", "|---|---|---|"]
        for entry in (one for one in entries() if one.group == group):
            cause, remedy = (entry.why_ko, entry.todo_ko[0]) if language == "ko" else (entry.why, entry.todo[0])
            shown = f"`` {entry.has[0]} ``".replace("|", "\\|")
            lines.append(f"| {shown} | {cause} | {remedy} [{entry.name}]({entry.see}) |")
    return "\n".join(lines)


def table_of_modules() -> str:
    """Return a row for each module, with the first line of its docstring."""
    package = Path(gluon_mgpu.__file__).parent
    rows = ["| module | what it is for |", "|---|---|"]
    for path in sorted(package.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if not path.name.startswith("__"):
            rows.append(f"| `{path.relative_to(package)}` | {docstring.splitlines()[0]} |")
    return "\n".join(rows)


def setup(app: Any) -> None:
    """Connect what this file adds."""
    app.connect("source-read", fill_lists)
    app.connect("autodoc-process-docstring", indent_fences, priority=100)
