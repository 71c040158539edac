"""What all commands have in common: help, examples, exit statuses, JSON, completion, and the page about them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nanguard
from cli_page import PAGE, arguments, commands, examples, exit_statuses, options, page, paragraphs
from nanguard.cli import app
from nanguard.policy.policy import recipe_names

SOURCE = Path(nanguard.__file__).parents[1]
NAMES = sorted(commands())
WITH_JSON = [name for name in NAMES if any("--json" in option.opts for option in options(commands()[name]))]
OF_A_FILE = [name for name in NAMES if arguments(commands()[name])]
ALSO_NEEDED = {"replay": ["--entry", "nowhere:build"]}


def nanguard_command(*arguments: str, input: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """``python -m nanguard``, in a pipe of 80 columns."""
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")}
    env |= {"PYTHONPATH": str(SOURCE), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **environ}
    return subprocess.run(
        [sys.executable, "-m", "nanguard", *arguments],
        capture_output=True,
        encoding="utf-8",
        env=env,
        input=input,
        timeout=300,
        check=False,
    )


def words(text: str) -> str:
    """Without frames, colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


# ---- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_help_fills_the_width_of_the_terminal(name: str) -> None:
    """A docstring is not broken where its source is."""
    lines = [line.strip() for line in nanguard_command(name, "--help").stdout.splitlines()]
    for part in paragraphs(commands()[name]):
        assert set(textwrap.wrap(part, 78, break_on_hyphens=False)) <= set(lines)


@pytest.mark.parametrize("name", NAMES)
def test_help_has_examples_of_this_very_command(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    told = examples(commands()[name])
    assert told
    for example in told:
        assert f"nanguard {name}" in example
        assert " ".join(example.split()) in words(result.output)


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_the_exit_statuses_mean(name: str) -> None:
    assert exit_statuses(commands()[name])


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_and_option_is_explained(name: str) -> None:
    for parameter in commands()[name].params:
        assert parameter.help, parameter.name
        assert parameter.help.endswith((".", "]")), parameter.help


@pytest.mark.parametrize("name", NAMES)
def test_examples_use_only_options_that_there_are(name: str) -> None:
    known = {spelling for option in options(commands()[name]) for spelling in option.opts}
    for example in examples(commands()[name]):
        mine = example.partition(f"nanguard {name}")[2].partition("|")[0]
        if name == "run":  # what stands after the script is the script's
            mine = re.split(r"\S+\.py|-m \S+", mine)[0]
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", mine)) <= known, example


def test_all_commands_are_listed() -> None:
    told = words(CliRunner().invoke(app, ["--help"]).output)
    assert [name for name in NAMES if name not in told] == []
    assert "nanguard demo" in told


def test_without_a_command_there_is_help_and_status_2() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Usage" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in NAMES)])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom nanguard.cli import main\n"
        f"sys.argv = ['nanguard', *{arguments!r}]\nmain()"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=env, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_m_nanguard_is_the_command() -> None:
    done = nanguard_command("--version")
    assert (done.returncode, done.stdout) == (0, f"nanguard {nanguard.__version__}\n")
    assert "Usage: nanguard" in nanguard_command("--help").stdout


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_A_FILE)
def test_a_file_that_is_not_there_is_said_with_status_2(name: str, tmp_path: Path) -> None:
    flags = ["--once"] if name == "watch" else []
    done = nanguard_command(name, *ALSO_NEEDED.get(name, []), *flags, str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "nowhere" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_said_with_status_2(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--no-such-option"])
    assert result.exit_code == 2
    assert "No such option" in words(result.output)


def test_an_unknown_command_is_said_with_status_2() -> None:
    result = CliRunner().invoke(app, ["no-such-command"])
    assert result.exit_code == 2
    assert "No such command" in words(result.output)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_the_commands_that_a_script_would_want_have_json() -> None:
    assert {"check", "demo", "doctor", "explain", "replay", "report", "watch"} <= set(WITH_JSON)


@pytest.mark.parametrize("name", sorted(set(WITH_JSON) & set(OF_A_FILE)))
def test_json_is_one_object_also_where_something_is_wrong(name: str, tmp_path: Path) -> None:
    done = nanguard_command(name, *ALSO_NEEDED.get(name, []), str(tmp_path / "nowhere"), "--json")
    told = json.loads(done.stdout)
    assert told["schema"] == 1
    assert told["status"] == done.returncode == 2


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one incident."""
    import torch
    from torch import nn

    folder = tmp_path_factory.mktemp("runs") / "a"
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [torch.randn(3, 4) for _ in range(6)]
    batches[3][1, 2] = torch.inf
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nanguard.Guard(model, optimizer, precision="fp32", run_dir=folder) as guard:
        for batch in guard.epoch(batches):
            guard.step(lambda model, x: model(x).square().mean(), batch)
    torch.save(model.state_dict(), folder / "model.pt")
    return folder


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["explain", "RUN"], {"incidents", "troubles"}),
        (["report", "RUN"], {"report", "runs"}),
        (["watch", "RUN"], set()),
        (["check", "RUN/model.pt"], {"files"}),
        (["doctor"], {"machine", "findings"}),
        (["doctor", "SCRIPT"], {"machine", "findings", "script"}),
        (["demo", "--steps", "1", "--quiet", "--run-dir", "NEW"], {"plain", "guarded", "run_dir"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_is_one_object(arguments: list[str], keys: set[str], run_dir: Path, tmp_path: Path) -> None:
    places = {"RUN": str(run_dir), "SCRIPT": __file__, "NEW": str(tmp_path / "new")}
    spelled = [re.sub("RUN|SCRIPT|NEW", lambda match: places[match[0]], argument) for argument in arguments]
    done = nanguard_command(*spelled, "--json")
    told = json.loads(done.stdout, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert keys <= set(told)
    assert told.get("status", done.returncode) == done.returncode
    assert done.returncode in (0, 1)


# ---- completion ------------------------------------------------------------------------------------------------------

SHELLS = ("bash", "zsh", "fish")


def complete(shell: str, line: str) -> str:
    """What a shell is told when Tab is pressed after ``line``."""
    parts = line.split(" ")
    environ = {
        "_NANGUARD_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(parts),
        "COMP_CWORD": str(len(parts) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    return nanguard_command(**environ).stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_its_script(shell: str) -> None:
    script = nanguard_command(_NANGUARD_COMPLETE=f"source_{shell}").stdout
    assert f"_NANGUARD_COMPLETE=complete_{shell}" in script
    assert {"bash": "complete -o default -F", "zsh": "#compdef nanguard", "fish": "complete --command nanguard"}[
        shell
    ] in script


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_are_completed(shell: str) -> None:
    told = complete(shell, "nanguard d")
    for name in NAMES:
        assert (re.search(rf"\b{name}\b", told) is not None) is name.startswith("d")


@pytest.mark.parametrize("shell", SHELLS)
def test_options_are_completed(shell: str) -> None:
    told = complete(shell, "nanguard demo --s")
    assert "--seed" in told
    assert "--steps" in told
    assert "--quiet" not in told


@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_recipes_are_completed(shell: str) -> None:
    told = complete(shell, "nanguard run --policy s")
    assert {"speechbrain", "separation"} <= set(recipe_names())
    for name in recipe_names():
        assert (re.search(rf"\b{name}\b", told) is not None) is name.startswith("s")


def test_paths_are_left_to_the_shell() -> None:
    assert complete("bash", "nanguard explain ru").strip() == ""  # -o default: bash then completes file names
    assert "_files" in complete("zsh", "nanguard explain ru")
    assert complete("fish", "nanguard explain ru").strip() == ""


def test_bash_itself_completes_with_the_script(tmp_path: Path) -> None:
    """A real bash, with the script sourced and the function called as readline calls it."""
    launcher = tmp_path / "nanguard"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nanguard "$@"\n')
    launcher.chmod(0o755)
    program = (
        "source <(_NANGUARD_COMPLETE=source_bash nanguard); COMP_WORDS=(nanguard doc); COMP_CWORD=1; "
        '_nanguard_completion nanguard; echo "${COMPREPLY[@]}"'
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", program], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.stdout.split() == ["doctor"], done.stderr


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_commands_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run: python tests/cli_page.py"


def test_every_command_and_option_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, command in commands().items():
        section = text.partition(f"## nanguard {name}\n")[2].partition("\n## ")[0]
        missing = [option.opts[0] for option in options(command) if f"`{option.opts[0]}`" not in section]
        missing += [example for example in examples(command) if example not in section]
        assert missing == [], name
