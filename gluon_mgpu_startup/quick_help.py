"""The help of the commands, shown from help.json in a tenth of a second: importing MXNet takes seconds."""

from __future__ import annotations

import json
import os
import runpy
from typing import Any, List, Optional, Sequence, Tuple

import click

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, "help.json")


class _Described(click.Group):
    """A command of which only the help is known."""

    def __init__(self, name: str, content: Any, **options: Any) -> None:
        super().__init__(name, help=content["help"], short_help=content["short_help"], **options)
        self._usage: List[str] = content["usage"]
        self._options: List[Tuple[str, str]] = [(left, right) for left, right in content["options"]]

    def collect_usage_pieces(self, ctx: click.Context) -> List[str]:
        return self._usage

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options"):
            formatter.write_dl(self._options)
        self.format_commands(ctx, formatter)


def quick_help(arguments: Sequence[str]) -> Optional[click.Command]:
    """Return a command that answers these arguments without MXNet, None if they ask for more than help or the version."""
    *path, last = arguments or [""]
    if last not in ("-h", "--help", "--version"):
        path = list(arguments)
    elif last == "--version" and path:
        return None
    try:
        with open(FILE, encoding="utf-8") as file:
            contents = json.load(file)["commands"]
    except (OSError, ValueError):
        return None
    name = " ".join(path)
    is_group = any(other.rpartition(" ")[0] == name for other in contents if other)
    if name not in contents or (len(path) == len(arguments) and not is_group):
        return None
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
    root: Any = _Described("gluon-mgpu", contents[""], context_settings=settings)
    groups = {"": root}
    for name in sorted(contents)[1:]:
        parent, _, own = name.rpartition(" ")
        groups[name] = _Described(own, contents[name])
        groups[parent].add_command(groups[name])
    version = runpy.run_path(os.path.join(os.path.dirname(HERE), "gluon_mgpu", "version.py"))["__version__"]
    return click.version_option(version, package_name="gluon_mgpu")(root)  # type: ignore[no-any-return]
