"""Write gluon_mgpu_startup/help.json, from which `gluon-mgpu --help` is shown without importing MXNet."""

import copy
import inspect
import json
from importlib.metadata import version
from typing import Any, Dict, Optional

import click
from gluon_mgpu.cli import main as command

from gluon_mgpu_startup.quick_help import FILE

Commands = Dict[str, Dict[str, object]]


def fresh(one: click.Command) -> click.Command:
    """Return a copy of a command and its subcommands, without the names of help options that click keeps from earlier calls."""
    copied: Any = copy.copy(one)
    copied._help_option = None
    if isinstance(one, click.Group):
        copied.commands = {name: fresh(child) for name, child in one.commands.items()}
    return copied  # type: ignore[no-any-return]


def described(one: click.Command, parent: Optional[click.Context] = None) -> Commands:
    """Return the help of a command and of all its subcommands, by their names."""
    context = click.Context(one, info_name=one.name, parent=parent, **one.context_settings)
    records = [parameter.get_help_record(context) for parameter in one.get_params(context) if isinstance(parameter, click.Option)]
    content: Dict[str, object] = {
        "usage": one.collect_usage_pieces(context),
        "help": inspect.cleandoc(one.help or ""),
        "short_help": one.short_help,
        "options": [record for record in records if record is not None],
    }
    name = " ".join(context.command_path.split()[1:])
    found = {name: content}
    for child in getattr(one, "commands", {}).values():
        found.update(described(child, context))
    return found


def text() -> str:
    """Return the content of the file."""
    commands = described(fresh(command))
    return json.dumps({"click": version("click"), "commands": commands}, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the file."""
    with open(FILE, "w", encoding="utf-8") as file:
        file.write(text())


if __name__ == "__main__":
    main()
