"""How Sphinx builds the site: sh scripts/docs.sh"""

import ast
import re
from pathlib import Path
from typing import Any, Dict, List

import gluon_mgpu
from gluon_mgpu.known_errors import entries
from sphinx.search.en import SearchEnglish

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


# Members that other modules of the package call, and programs do not.
INTERNAL = {
    "Checkpoint": "hold release wait check_resumable",
    "Group": "note_divided exchange",
    "LocalSGD": "average_replicas flush state restore",
    "MetricSums": "state restore",
    "PairLoader": "order",
    "Pipeline": "forward replica_of make_passes",
    "Process": "variables",
    "Seq2Seq": "hybridize forward graph_inputs compute",
    "SequenceLoss": "forward graph num_units class_labels",
    "SyncBatchNorm": "forward",
    "Residual": "compute",
    "Trainer": "virtual_shards use_virtual_shards resolve_shapes average_replicas check_begun take leave_out state check_state "
    "restore check_applied exchange",
    "Translator": "write config save_config",
    "Vocabulary": "config",
    "WeightAverage": "state_arrays",
}


def hide_internal(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> Any:
    """Hide members that no program calls, and what the package's callbacks do at each event."""
    kind, _, member = getattr(getattr(obj, "fget", obj), "__qualname__", "").rpartition(".")
    return True if member in INTERNAL.get(kind, "").split() or (member.startswith("on_") and kind != "Callback") else None


# The theme's own words on Korean pages.
KOREAN = {
    "Search": "검색",
    "On this page": "이 페이지에서",
    "Next": "다음",
    "Previous": "이전",
    "Home": "처음",
    "View this page": "원본 보기",
}


class Substrings(SearchEnglish):
    """Indexes each part of a Korean word as well: a particle or an ending may follow what a reader looks for."""

    def split(self, input: str) -> List[str]:
        words = super().split(input)
        korean = [part for word in words for part in re.findall("[가-힣]+", word)]
        return words + [part[i:j] for part in korean for i in range(len(part)) for j in range(i + 2, min(i + 6, len(part)) + 1)]


def is_korean(page: str) -> bool:
    """Return whether a page is of the Korean site."""
    return "/ko/" in page or page.endswith(".ko")


def speak_its_language(app: Any, pagename: str, templatename: str, context: Dict[str, Any], doctree: Any) -> None:
    """Give a page the sidebar of its language, and a link to the same page in the other one."""
    korean = is_korean(pagename)
    context["language"] = "ko" if korean else "en"
    if korean:
        context["_"] = lambda text: KOREAN.get(text, text)
    other = (
        pagename.replace("/ko/", "/").replace(".ko", "") if korean else re.sub(r"^(docs|notebooks)/", r"\1/ko/", f"{pagename}")
    )
    other = "README.ko" if pagename == "README" else other
    if other not in app.env.all_docs:
        other = "docs/index" if korean else "docs/ko/index"
    tree = context.get("furo_navigation_tree", "")
    parts = re.split(r'(?=<p class="caption")', tree)
    own = "".join(part for part in parts if bool(re.search("[가-힣]", part.split("</p>")[0])) == korean)
    href, name = app.builder.get_relative_uri(pagename, other), "English" if korean else "한국어"
    link = f'<ul><li class="toctree-l1"><a class="reference internal" href="{href}">{name}</a></li></ul>'
    context["furo_navigation_tree"] = link + own


def redirect_root(app: Any, error: Any) -> None:
    """Let the root of the site lead to its front page."""
    if error is None and app.builder.format == "html":
        Path(app.outdir, "index.html").write_text(
            '<meta http-equiv="refresh" content="0; url=docs/index.html">', encoding="utf-8"
        )


def indent_fences(app: Any, what: str, name: str, obj: Any, options: Any, lines: List[str]) -> None:
    """Turn what docstrings fence with ``` into literal blocks of reStructuredText."""
    found: List[str] = []
    inside = False
    for line in lines:
        if line.strip() == "```":
            inside = not inside
            found += [".. code-block:: text", ""] if inside else [""]
        else:
            found.append("    " + line if inside else line)
    lines[:] = found


def fill_lists(app: Any, docname: str, source: List[str]) -> None:
    """Put the list of modules, and that of error messages, into their pages."""
    if "<!-- modules -->" in source[0]:
        source[0] = source[0].replace("<!-- modules -->", table_of_modules())
    if "<!-- messages -->" in source[0]:
        korean = is_korean(docname)
        tables = tables_of_messages("ko" if korean else "en")
        source[0] = source[0].replace("<!-- messages -->", re.sub(r"\]\((?!https:)", "](../", tables) if korean else tables)


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
    app.connect("autodoc-skip-member", hide_internal)
    app.connect("html-page-context", speak_its_language, priority=900)  # after the theme has made its sidebar
    app.connect("build-finished", redirect_root)
    app.add_search_language(Substrings)
