"""`zaya completion SHELL`: a script with which a shell completes verbs, options, config fields and files.

The script has all words in it. So a shell answers by itself, without a Python that would import jax first.
"""

import argparse
import dataclasses
import importlib
import shlex
from collections.abc import Iterator, Sequence

from zaya_jax.config_help import field_helps
from zaya_jax.options import HELP_CONFIG, Parser, parser_of
from zaya_jax.verbs import VERBS

BESIDE_CHOICES = {"convert": ("inspect",), "plan": ("failures",)}
"""Verbs within verbs that are no choices of their parser: what else stands there is a path, or nothing."""
FILE, WORD = "@file", "@word"
"""In place of values that can be listed: a path, or what only the user knows."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a verb, as a shell is told of it.

    Attributes:
      name: with its dashes.
      values: that it can have, or `FILE` or `WORD`; none of an option that stands alone.
      summary: a line on what it is.
    """

    name: str
    values: tuple[str, ...]
    summary: str


@dataclasses.dataclass(frozen=True)
class CompletionPlace:
    """What can follow a verb, or a verb within it.

    Attributes:
      words: the verb, and the one within it, if any.
      verbs: those within it.
      options: of it.
    """

    words: tuple[str, ...]
    verbs: tuple[str, ...]
    options: tuple[Option, ...]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya completion` with the words behind it.

    Raises:
      ValueError: for a shell that it has no script for.
    """
    options = _parser().parse_args(argv)
    print(SCRIPTS[options.shell](list(places())), end="")


def _parser() -> Parser:
    parser = Parser(
        "completion",
        "Prints a script with which a shell completes verbs, options, config fields and files.",
        (
            'eval "$(zaya completion bash)"                   # this shell',
            "zaya completion bash > ~/.local/share/bash-completion/completions/zaya",
            "zaya completion zsh > ~/.zaya.zsh                # and in ~/.zshrc: source ~/.zaya.zsh",
            "zaya completion fish > ~/.config/fish/completions/zaya.fish",
        ),
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="which shell")
    return parser


def places() -> Iterator[CompletionPlace]:
    """What can follow each verb, as its own parser has it."""
    fields = tuple(_fields())
    for verb in VERBS:
        verb_main = importlib.import_module(VERBS[verb][0]).main
        parser = parser_of(verb_main)
        within = (*BESIDE_CHOICES.get(verb, ()), *_choices(parser))
        yield CompletionPlace((verb,), within, (*_options(parser), *_fields_of(parser, fields)))
        for word in within:
            inner = parser_of(verb_main, word)
            # A choice without a parser of its own has the options around it.
            yield CompletionPlace((verb, word), (), (*_options(inner), *_fields_of(inner, fields)))


def _choices(parser: Parser) -> tuple[str, ...]:
    """What a parser's first word must be, where it is one of some."""
    first = next((action for action in parser._actions if not action.option_strings), None)
    return tuple(first.choices or ()) if first is not None else ()


def _options(parser: Parser) -> Iterator[Option]:
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--"):
                summary = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
                yield Option(name, _values(action), summary.replace("%(default)s", str(action.default)))


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.nargs == 0:
        return ()
    if action.choices is not None:
        return tuple(map(str, action.choices))
    # A path is what text may be; numbers are known to nobody.
    return (WORD,) if action.type in (int, float) or action.dest == _dest(HELP_CONFIG) else (FILE,)


def _dest(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _fields() -> Iterator[Option]:
    for field in field_helps():
        is_text = field.hint in (str, str | None)
        values = field.choices or ((FILE,) if is_text else (WORD,))
        yield Option(f"--config.{field.path}", values, field.text.partition(". ")[0])


def _fields_of(parser: Parser, fields: tuple[Option, ...]) -> tuple[Option, ...]:
    return fields if HELP_CONFIG in parser.option_names else ()


BASH = r"""
_zaya() {
    local IFS=$' \t\n' line="${COMP_LINE:0:$COMP_POINT}" cur prev place option verbs values
    # Taken apart here: bash cuts words at "=" too, and zsh does not.
    local -a words
    if [[ -n "$ZSH_VERSION" ]]; then words=($line); else read -ra words <<< "$line"; fi
    [[ "$line" == *[[:space:]] ]] && words+=("")
    local last=$((${#words[@]} - 1)) begin=0
    [[ -n "$ZSH_VERSION" ]] && begin=1 last=${#words[@]}
    cur="${words[$last]}" prev="${words[$last - 1]}"
    COMPREPLY=()
    if ((last == begin + 1)); then
        COMPREPLY=($(compgen -W "@VERBS@ --help --version" -- "$cur"))
        return
    fi
    place="${words[$begin + 1]}"
    verbs=" $(_zaya_verbs "$place") "
    if ((last > begin + 2)) && [[ "$verbs" == *" ${words[$begin + 2]} "* ]]; then
        place="$place ${words[$begin + 2]}"
    elif ((last == begin + 2)) && [[ "$cur" != -* && "$verbs" != "  " ]]; then
        _zaya_files "$cur" ""
        COMPREPLY+=($(compgen -W "$verbs" -- "$cur"))
        return
    fi
    if [[ "$cur" == --*=* ]]; then
        option="${cur%%=*}" cur="${cur#*=}"
        _zaya_complete_value "$place" "$option" "$cur" "$option="
        return
    fi
    if [[ "$cur" == -* ]]; then
        COMPREPLY=($(compgen -W "$(_zaya_options "$place")" -- "$cur"))
        # A field goes on with its value, in the same word.
        [[ "${COMPREPLY[*]}" == *= ]] && compopt -o nospace 2> /dev/null
        return
    fi
    if [[ "$prev" == --* ]]; then
        values="$(_zaya_values "$place" "$prev")"
        if [[ -n "$values" ]]; then
            _zaya_complete_value "$place" "$prev" "$cur" ""
            return
        fi
    fi
    _zaya_files "$cur" ""
}

_zaya_complete_value() {
    local values="$(_zaya_values "$1" "$2")" front="$4"
    # bash has cut the word behind "=", and takes what follows.
    [[ -z "$ZSH_VERSION" && "$COMP_WORDBREAKS" == *"="* ]] && front=""
    case "$values" in
        @file) _zaya_files "$3" "$front" ;;
        @word | "") ;;
        *) COMPREPLY=($(compgen -P "$front" -W "$values" -- "$3")) ;;
    esac
}

_zaya_files() {
    local IFS=$'\n'
    # zsh's own compgen lists the folder that it is in, whatever has been typed.
    if [[ -n "$ZSH_VERSION" ]]; then COMPREPLY=($(_zaya_beginning "$1" "$2")); return; fi
    COMPREPLY=($(compgen -P "$2" -f -- "$1"))
    compopt -o filenames 2>/dev/null
}

_zaya_beginning() {
    local path
    setopt localoptions nullglob
    for path in "$1"*; do echo "$2$path"; done
}
"""


def bash_script(found: Sequence[CompletionPlace]) -> str:
    """The words as shell functions, and one that looks among them."""
    verbs, options, values = [], [], []
    for place in found:
        name = shlex.quote(" ".join(place.words))
        if place.verbs:
            verbs.append(f"        {name}) echo {' '.join(place.verbs)} ;;")
        shown = (each.name + "=" * each.name.startswith("--config.") for each in place.options)
        options.append(f"        {name}) echo {' '.join(shown)} ;;")
        for each in place.options:
            if each.values and not each.name.startswith("--config."):
                pattern = shlex.quote(f"{' '.join(place.words)} {each.name}")
                values.append(f"        {pattern}) echo {shlex.quote(' '.join(each.values))} ;;")
    for each in _fields():  # the same whoever takes them
        values.append(f'        *" {each.name}") echo {shlex.quote(" ".join(each.values))} ;;')
    return (
        "# Made by `zaya completion`: make it anew behind an update.\n"
        + _function("_zaya_verbs", "$1", verbs)
        + _function("_zaya_options", "$1", options)
        + _function("_zaya_values", "$1 $2", values)
        + BASH.replace("@VERBS@", " ".join(VERBS))
        + "\ncomplete -F _zaya zaya\n"
    )


def _function(name: str, what: str, cases: Sequence[str]) -> str:
    return "\n".join([f"{name}() {{", f'    case "{what}" in', *cases, "    esac", "}", ""])


def zsh_script(found: Sequence[CompletionPlace]) -> str:
    """That of bash, which zsh takes by a function of its own."""
    return "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n" + (
        # In these functions zsh is to cut unquoted words as bash does.
        bash_script(found).replace("_zaya() {\n", "_zaya() {\n    setopt localoptions shwordsplit\n", 1)
    )


def fish_script(found: Sequence[CompletionPlace]) -> str:
    """A line of `complete` for each word."""
    lines = ["# Made by `zaya completion`: make it anew behind an update."]
    at_first = "not __fish_seen_subcommand_from " + " ".join(VERBS)
    for verb, (_, summary) in VERBS.items():
        lines.append(_fish(at_first, f"-f -a {verb}", summary))
    lines += [_fish(at_first, f"-l {name}", "") for name in ("help", "version")]
    for place in found:
        condition = f"__fish_seen_subcommand_from {place.words[0]}"
        if len(place.words) == 2:
            condition += f"; and __fish_seen_subcommand_from {place.words[1]}"
        elif place.verbs:
            condition += "; and not __fish_seen_subcommand_from " + " ".join(place.verbs)
            lines += [_fish(condition, f"-a {verb}", "") for verb in place.verbs]
        lines += [_fish(condition, _fish_option(each), each.summary) for each in place.options]
    return "\n".join(lines) + "\n"


def _fish(condition: str, what: str, summary: str) -> str:
    about = f" -d {_fish_quoted(summary)}" if summary else ""
    return f"complete -c zaya -n {_fish_quoted(condition)} {what}{about}"


def _fish_option(option: Option) -> str:
    name = f"-l {option.name.removeprefix('--')}"
    if not option.values:
        return name
    if option.values in ((FILE,), (WORD,)):
        return f"{name} {'-r -F' if option.values == (FILE,) else '-x'}"
    return f"{name} -x -a {_fish_quoted(' '.join(option.values))}"


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
