
_zaya() {
  local prefix kinds
  local -a lines going_on done
  lines=("${(@f)$(_zaya_answer "${(@Q)words[2,CURRENT]}")}")
  prefix="$lines[1]" kinds="$lines[2]"
  shift 2 lines
  if [[ -n $prefix ]]; then compset -P "$prefix"; fi
  going_on=("${(@M)lines:#*[=.]}") done=("${(@)lines:#*[=.]}")
  compadd -S '' -- "${(@)going_on:#}"
  compadd -- "${(@)done:#}"
  if [[ $kinds == *folder* ]]; then
    _files -/
  elif [[ $kinds == *file* ]]; then
    _files
  fi
}
# As a file in fpath it is the function's own first call; read by eval it is not.
if [[ $funcstack[1] == _zaya ]]; then _zaya "$@"; else compdef _zaya zaya; fi
