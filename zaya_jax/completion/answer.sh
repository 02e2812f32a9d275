
# Prints the completions of the last of its arguments, which are the words after "zaya": a line with the part
# before the completions, such as "--config=", a line with "file" or "folder" if names of these are possible, and
# a line per word. bash and zsh call it.
_zaya_answer() {
  if [ -n "${ZSH_VERSION-}" ]; then emulate -L sh; fi
  local at='' option='' kinds='' prefix='' before='' word current words each
  while [ $# -gt 1 ]; do
    word="$1"
    shift
    case "$word" in
      --) at='' option='' ;; # another command follows, after launch and supervise
      -*=*) option='' ;;
      -*)
        option=''
        if [ -n "$(_zaya_values "$at $word")" ]; then option="$word"; fi
        ;;
      *)
        if [ -n "$option" ]; then
          case "$(_zaya_values "$at $option")" in
            *@many*) ;;
            *) option='' ;;
          esac
        else
          case " $(_zaya_subcommands "$at") " in
            *" $word "*) at="${at:+$at }$word" ;;
          esac
        fi
        ;;
    esac
  done
  current="$1"
  case "$current" in
    -*=*)
      option="${current%%=*}"
      prefix="$option="
      current="${current#*=}"
      ;;
    -*) option='' ;;
  esac
  if [ -n "$option" ]; then
    words="$(_zaya_values "$at $option")"
  else
    case "$current" in
      -*) words="$(_zaya_options "$at")" ;;
      *) words="$(_zaya_subcommands "$at") $(_zaya_operands "$at")" ;;
    esac
  fi
  for each in $words; do
    case "$each" in
      @file | @folder) kinds="$kinds ${each#@}" ;;
    esac
  done
  printf '%s\n' "$prefix" "$kinds"
  for each in $words; do
    case "$each" in
      @fields)
        # Complete one section at a time: all fields at once would fill the screen.
        for each in $_zaya_fields; do
          case "$each" in
            "$current"*)
              word="${each#"$current"}"
              case "$word" in
                *.*) word="$current${word%%.*}." ;;
                *) word="$each=" ;;
              esac
              if [ "$word" != "$before" ]; then printf '%s\n' "$word"; fi
              before="$word"
              ;;
          esac
        done
        ;;
      @*) ;;
      "$current"*) printf '%s\n' "$each" ;;
    esac
  done
}
