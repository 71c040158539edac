"""The reference part of docs/cli.md, made from the commands themselves. ``python tests/cli_page.py`` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from nanguard.checkup.rules import RULES
from nanguard.cli import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
BEGIN, END = "<!-- commands:begin -->", "<!-- commands:end -->"


def commands() -> dict[str, Any]:
    """The commands by name, as typer has them."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def arguments(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "argument"]


def options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def paragraphs(command: Any) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", command.help or "")]


def examples(command: Any) -> list[str]:
    return [line for line in (command.epilog or "").split("\n\n") if line and line != "Examples:"]


def exit_statuses(command: Any) -> list[str]:
    return [part for part in paragraphs(command) if part.startswith("Exits with ")]


def reference() -> str:
    return "\n\n".join(section(name, command) for name, command in commands().items())


def section(name: str, command: Any) -> str:
    spelled = [_in_usage(argument) for argument in arguments(command)]
    usage = " ".join(["nanguard", name, "[OPTIONS]", *spelled])
    told = [part for part in paragraphs(command) if not part.startswith("Exits with ")]
    rows = [f"| `{_cell(argument.metavar)}` | {_cell(argument.help)} |" for argument in arguments(command)]
    rows += [f"| {_spelling(option)} | {_cell(option.help)}{_default(option)} |" for option in options(command)]
    seeks = [rules_table()] if name == "doctor" else []
    return "\n\n".join(
        [
            f"## nanguard {name}",
            *told,
            *exit_statuses(command),
            "\n".join(["```console", f"$ {usage}", "```"]),
            "\n".join(["| | |", "| --- | --- |", *rows]),
            "\n".join(["```console", *(f"$ {line}" for line in examples(command)), "```"]),
            *seeks,
        ]
    )


def rules_table() -> str:
    rows = [f"| `{rule.name}` | {rule.severity} | {_cell(rule.why)} | {_cell(rule.change)} |" for rule in RULES]
    head = ["What it looks for in a program:", "", "| rule | | why | what to change |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def page(text: str) -> str:
    """The page with the reference put in anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def _in_usage(argument: Any) -> str:
    name = argument.metavar if argument.nargs != -1 else f"{argument.metavar.rstrip('.')}..."
    return str(name) if argument.required else f"[{name}]"


def _spelling(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    return names if option.is_flag else f"{names} `{option.metavar or option.name.rpartition('_')[2].upper()}`"


def _default(option: Any) -> str:
    if option.required:
        return " Required."
    if option.is_flag or option.default is None or callable(option.default):
        return ""
    return f" Default: `{option.default}`."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
