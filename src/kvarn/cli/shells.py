"""The completion scripts of bash, zsh and fish, from a list of commands. Text in, text out.

Every script finds the command first: the first word after `kvarn`, or the first two (`bench serve`).
"""

import shlex

from kvarn.cli.completion import Command, Option, Value

_BASH = """\
# bash completion of kvarn, written by `kvarn completion bash`
_kvarn() {
    local at=$COMP_CWORD current="${COMP_WORDS[COMP_CWORD]}" before="" options="" words="" files="" value="" several=""
    if [[ $current == ":" ]]; then  # bash splits at colons: qwen3:
        before="${COMP_WORDS[at-1]}:" current="" at=$((at - 1))
    elif (( at > 2 )) && [[ ${COMP_WORDS[at-1]} == ":" ]]; then  # qwen3:0
        before="${COMP_WORDS[at-2]}:" at=$((at - 2))
    fi
    local previous="${COMP_WORDS[at-1]}" command="${COMP_WORDS[1]}"
    if [[ $current == "=" ]]; then  # and at equal signs: --cache=
        current=""
    elif [[ $previous == "=" ]]; then  # --cache=pa
        previous="${COMP_WORDS[at-2]}"
    fi
    (( at == 1 )) && command=""
    if (( at > 2 )); then
        case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
            @TWO@) command="${COMP_WORDS[1]} ${COMP_WORDS[2]}" ;;
        esac
    fi
    case $command in
        "")
            options="--help --version"
            words="@COMMANDS@" ;;
@CASES@
    esac
    [[ -z $value && $current == -* ]] && words=$options files=""
    local IFS=$' \\n'
    if [[ -n $several && $current == *,* ]]; then  # paged,
        COMPREPLY=($(compgen -P "${current%,*}," -W "$words" -- "${current##*,}"))
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$before$current"))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    if [[ -n $files && -z $before ]]; then
        compopt -o filenames 2>/dev/null
        IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}
complete -F _kvarn kvarn
"""


def bash(commands: list[Command]) -> str:
    cases = []
    for command in commands:
        names = " ".join(name for option in command.options for name in option.names)
        cases += [f'        "{command.name}")', f'            options="{names}"']
        cases += [f"            {_bash_value(_joined(command.words))}", "            case $previous in"]
        alike: dict[str, list[str]] = {}  # options that take the same values
        for option in command.options:
            if option.value is not None:
                alike.setdefault(_bash_value(option.value), []).extend(option.names)
        cases += [f"                {'|'.join(same)}) value=yes {value} ;;" for value, same in alike.items()]
        cases += ["            esac ;;"]
    two = "|".join(f'"{command.name}"' for command in commands if " " in command.name)
    text = _BASH.replace("@TWO@", two).replace("@CASES@", "\n".join(cases))
    return text.replace("@COMMANDS@", " ".join(_first_words(commands)))


def _bash_value(value: Value) -> str:
    several = " several=yes" if value.several else ""
    return f'words="{" ".join(value.words)}" files={"yes" if value.files else ""}{several}'


_FISH = """\
# fish completion of kvarn, written by `kvarn completion fish`
function __kvarn_is
    set -l words (commandline -opc)
    set -l command "$words[2]"
    if contains -- "$words[2] $words[3]" @TWO@
        set command "$words[2] $words[3]"
    end
    test "$command" = "$argv[1]"
end
complete -c kvarn -f
complete -c kvarn -n 'test (count (commandline -opc)) -eq 1' -l help -d 'show this text'
complete -c kvarn -n 'test (count (commandline -opc)) -eq 1' -l version -d 'show the version'
"""


def fish(commands: list[Command]) -> str:
    two = " ".join(f"'{command.name}'" for command in commands if " " in command.name)
    lines = [_FISH.replace("@TWO@", two)]
    for command in commands:
        if " " not in command.name:
            first = "-n 'test (count (commandline -opc)) -eq 1'"
            lines.append(f"complete -c kvarn {first} -a {command.name} -d {_fish_text(command.about)}\n")
        there = f"complete -c kvarn -n '__kvarn_is \"{command.name}\"'"
        word = _joined(command.words)
        if word.words or word.files:
            lines.append(f"{there} {_fish_value(word)}\n")
        for option in command.options:
            names = " ".join(_fish_name(name) for name in option.names)
            value = "" if option.value is None else f" -r {_fish_value(option.value)}".rstrip()
            lines.append(f"{there} {names}{value} -d {_fish_text(option.about)}\n")
    return "".join(lines)


def _fish_name(name: str) -> str:
    kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
    return f"{kind} {name.lstrip('-')}"


def _fish_value(value: Value) -> str:
    words = f"-a {_fish_text(' '.join(value.words))}" if value.words else ""
    return f"{'-F' if value.files else '-f'} {words}".rstrip()


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_ZSH = """\
#compdef kvarn
# zsh completion of kvarn, written by `kvarn completion zsh`
_kvarn_or_files() {
    _alternative "names:name:($*)" "files:file:_files"
}
_kvarn() {
    local curcontext="$curcontext" command="$words[2]"
    local -a commands=(
@COMMANDS@
    )
    if (( CURRENT == 2 )); then
        _describe -t commands command commands
        _arguments '--help[show this text]' '--version[show the version]'
        return
    fi
    if (( CURRENT > 3 )) && [[ "$words[2] $words[3]" == (@TWO@) ]]; then
        command="$words[2] $words[3]"
        shift words
        (( CURRENT-- ))
    fi
    shift words
    (( CURRENT-- ))
    case $command in
@CASES@
    esac
}
if [[ $funcstack[1] == _kvarn ]]; then
    _kvarn "$@"
else
    compdef _kvarn kvarn
fi
"""


def zsh(commands: list[Command]) -> str:
    listed = "\n".join(
        f"        {shlex.quote(f'{command.name}:{command.about}')}" for command in commands if " " not in command.name
    )
    cases = []
    for command in commands:
        specs = [spec for option in command.options for spec in _zsh_specs(option)]
        specs += [f":{word.name}:{_zsh_action(word)}" for word in command.words]
        cases += [f"        {shlex.quote(command.name)})", "            _arguments \\"]
        cases += [f"                {shlex.quote(spec)} \\" for spec in specs]
        cases += ["                && return ;;"]
    two = "|".join(shlex.quote(command.name) for command in commands if " " in command.name)
    text = _ZSH.replace("@COMMANDS@", listed).replace("@TWO@", two)
    return text.replace("@CASES@", "\n".join(cases))


def _zsh_specs(option: Option) -> list[str]:
    about = "".join(f"\\{c}" if c in "[]\\" else c for c in option.about)
    before = "*" if option.repeatable else f"({' '.join(option.names)})"
    if option.value is None:
        return [f"{before}{name}[{about}]" for name in option.names]
    value = f":{option.value.name.replace(':', ' ')}:{_zsh_action(option.value)}"
    return [f"{before}{name}{'=' if name.startswith('--') else ''}[{about}]{value}" for name in option.names]


def _zsh_action(value: Value) -> str:
    words = f"({' '.join(value.words)})"
    if value.files and value.words:
        names = " ".join(value.words).replace(":", "\\:")
        return f" _kvarn_or_files {names}"  # the space: _arguments adds nothing to the call
    if value.several:
        return f"_values -s , {value.name.strip(',.')} {' '.join(value.words)}"
    return "_files" if value.files else words if value.words else " "


def _joined(values: list[Value]) -> Value:
    """All that the words of a command may be, in one."""
    words = dict.fromkeys(word for value in values for word in value.words)
    return Value("", tuple(words), any(value.files for value in values))


def _first_words(commands: list[Command]) -> list[str]:
    return list(dict.fromkeys(command.name.split()[0] for command in commands))
