"""`completion`: scripts that complete commands, options and names in bash, zsh and fish."""

import argparse
import importlib
from dataclasses import dataclass

from rich.console import Console

from ..registry import NAMED_BY
from ..settings import SETTINGS


@dataclass(frozen=True)
class Option:
    flags: list[str]
    about: str
    values: list[str]  # words to offer after it
    takes_value: bool
    several: bool = False  # takes several values, as in `--algorithms fedavg mimic`


@dataclass(frozen=True)
class Command:
    name: str
    about: str
    words: list[str]  # positional words: `show`, `fetch`
    options: list[Option]


def completion(arguments: argparse.Namespace, console: Console) -> None:
    write = {"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell]
    print(write(commands()), end="")


def commands() -> list[Command]:
    """The commands as the parser knows them."""
    from .main import parser  # not at the top: that module names this one

    importlib.import_module("mimicfl._public")  # registers all names
    [action] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    about = {each.dest: each.help or "" for each in action._choices_actions}
    found = []
    for name, sub in action.choices.items():
        sub.format_help()  # fills in the help of settings
        words = [str(c) for a in sub._actions if not a.option_strings for c in a.choices or []]
        found.append(Command(name, about[name], words, [_option(a) for a in sub._actions if a.option_strings]))
    return found


def _option(action: argparse.Action) -> Option:
    name = action.dest
    values = [str(each) for each in action.choices or ()]
    if name in SETTINGS:
        values = list(SETTINGS[name].metadata["choices"]) or (sorted(NAMED_BY[name].factories) if name in NAMED_BY else [])
    elif name == "algorithms":
        values = sorted(NAMED_BY["algorithm"].factories)
    about = (action.help or "").replace("%%", "%")
    return Option(list(action.option_strings), about, values, action.nargs != 0, action.nargs in ("+", "*"))


def bash(found: list[Command]) -> str:
    """Words for the option before the cursor if it takes some, else the options and words of the command; files otherwise."""
    cases, several = [], sorted({flag for command in found for o in command.options if o.several for flag in o.flags})
    for command in found:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        values = "".join(
            f'            {"|".join(o.flags)}) words="{" ".join(o.values)}" ;;\n' for o in command.options if o.takes_value and o.values
        )
        free = [flag for o in command.options if o.takes_value and not o.values for flag in o.flags]
        values += f'            {"|".join(free)}) words="" ;;\n' if free else ""
        cases.append(
            f'        {command.name})\n          case "$before" in\n{values}'
            f'            *) words="{" ".join([*command.words, flags])}" ;;\n          esac ;;\n'
        )
    names = " ".join(command.name for command in found)
    return f"""# Completion of the command mimicfl for bash.
_mimicfl() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{names} --help --version"
    else
        local k=$((COMP_CWORD-1))
        while [ $k -gt 1 ] && [[ "${{COMP_WORDS[k]}}" != -* ]]; do k=$((k-1)); done
        case "$current" in -*) ;; *) case "${{COMP_WORDS[k]}}" in {"|".join(several)}) before="${{COMP_WORDS[k]}}" ;; esac ;; esac
        case "${{COMP_WORDS[1]}}" in
{"".join(cases)}        esac
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$current") )
}}
complete -o default -F _mimicfl mimicfl
"""


def zsh(found: list[Command]) -> str:
    """The options of each command with their help, as `_arguments` takes them."""
    cases = []
    for command in found:
        lines = [f"                {_zsh(option, flag)}" for option in command.options for flag in option.flags]
        first = f"'1:action:({' '.join(command.words)})'" if command.words else "'*:word:_mimicfl_words'"
        cases.append(
            f"            {command.name})\n              _arguments \\\n" + " \\\n".join([*lines, f"                {first}"]) + " ;;\n"
        )
    names = "\n".join(f"        {_single(f'{command.name}:{command.about}')}" for command in found)
    several = {"|".join(o.flags): " ".join(o.values) for command in found for o in command.options if o.several and o.values}
    further = "".join(f"        {flags}) compadd -- {values} ;;\n" for flags, values in several.items())
    return f"""#compdef mimicfl
# Completion of the command mimicfl for zsh.
_mimicfl_words() {{
    local k=$((CURRENT-1))
    while (( k > 1 )) && [[ $words[k] != -* ]]; do (( k-- )); done
    case $words[k] in
{further}        *) _files ;;
    esac
}}
_mimicfl() {{
    local -a commands
    commands=(
{names}
    )
    _arguments -C '1:command:->command' '*::argument:->argument'
    case $state in
        command) _describe command commands ;;
        argument)
          case $words[1] in
{"".join(cases)}          esac ;;
    esac
}}
if [ "$funcstack[1]" = "_mimicfl" ]; then _mimicfl "$@"; else compdef _mimicfl mimicfl; fi
"""


def _zsh(option: Option, flag: str) -> str:
    about = option.about.translate(str.maketrans("[]:", "();"))
    value = f":value:({' '.join(option.values)})" if option.values else ":value:_files"
    return _single(f"*{flag}[{about}]" + (value if option.takes_value else ""))


def fish(found: list[Command]) -> str:
    """One line per command and option."""
    lines = [
        "# Completion of the command mimicfl for fish.",
        "function __mimicfl_last_option",
        "    string match -- '-*' (commandline -opc) | tail -n 1",
        "end",
        "complete -c mimicfl -f -n __fish_use_subcommand -l version -d 'print the version'",
    ]
    for command in found:
        lines.append(f"complete -c mimicfl -f -n __fish_use_subcommand -a {command.name} -d {_single(command.about)}")
        where = f"-n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"complete -c mimicfl {where} -f -a {_single(' '.join(command.words))}"] if command.words else []
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = f" -x -a {_single(' '.join(option.values))}" if option.values else " -r" if option.takes_value else ""
            lines.append(f"complete -c mimicfl {where} {flags} -d {_single(option.about)}{value}")
            if option.several and option.values:
                after = f"{where[:-1]}; and contains -- (__mimicfl_last_option) {' '.join(option.flags)}'"
                lines.append(f"complete -c mimicfl {after} -f -a {_single(' '.join(option.values))}")
    return "\n".join(lines) + "\n"


def _single(text: str) -> str:
    """Text in single quotes, for any of the shells."""
    return "'" + " ".join(text.split()).replace("\\", "").replace("'", "’") + "'"
