
# What may stand for the last of some words behind "zaya": a line with what it must begin with and is no part
# of the answer, such as "--config=", a line with "file" or "folder" where such names may stand there, and a
# line for each word. bash and zsh call it.
_zaya_answer() {
  if [ -n "${ZSH_VERSION-}" ]; then emulate -L sh; fi
  local at='' option='' kinds='' prefix='' before='' word current given each
  while [ $# -gt 1 ]; do
    word="$1"
    shift
    case "$word" in
      --) at='' option='' ;; # launch and supervise have another verb behind it
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
          case " $(_zaya_verbs "$at") " in
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
    given="$(_zaya_values "$at $option")"
  else
    case "$current" in
      -*) given="$(_zaya_options "$at")" ;;
      *) given="$(_zaya_verbs "$at") $(_zaya_operands "$at")" ;;
    esac
  fi
  for each in $given; do
    case "$each" in
      @file | @folder) kinds="$kinds ${each#@}" ;;
    esac
  done
  printf '%s\n' "$prefix" "$kinds"
  for each in $given; do
    case "$each" in
      @fields)
        # A section at a time: all fields at once would be a page.
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
