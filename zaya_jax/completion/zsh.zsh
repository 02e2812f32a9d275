
_zaya() {
  local prefix kinds
  local -a lines unfinished done
  lines=("${(@f)$(_zaya_answer "${(@Q)words[2,CURRENT]}")}")
  prefix="$lines[1]" kinds="$lines[2]"
  shift 2 lines
  if [[ -n $prefix ]]; then compset -P "$prefix"; fi
  unfinished=("${(@M)lines:#*[=.]}") done=("${(@)lines:#*[=.]}")
  compadd -S '' -- "${(@)unfinished:#}"
  compadd -- "${(@)done:#}"
  if [[ $kinds == *folder* ]]; then
    _files -/
  elif [[ $kinds == *file* ]]; then
    _files
  fi
}
# A file in fpath is loaded by the first call of the function; eval only defines it.
if [[ $funcstack[1] == _zaya ]]; then _zaya "$@"; else compdef _zaya zaya; fi
