
_zaya() {
  local i word prefix kinds current line joins='' words=()
  # bash splits words at "=" and ":". Join them again.
  for ((i = 1; i <= COMP_CWORD; i++)); do
    word="${COMP_WORDS[i]}"
    if ((${#words[@]})) && [[ -n $joins || $word == [=:]* ]]; then
      words[${#words[@]} - 1]+="$word"
    else
      words+=("$word")
    fi
    joins=''
    if [[ $word == *[=:] ]]; then joins=1; fi
  done
  current="${words[${#words[@]} - 1]}"
  COMPREPLY=()
  {
    IFS= read -r prefix
    IFS= read -r kinds
    while IFS= read -r line; do COMPREPLY+=("$line"); done
  } < <(_zaya_answer "${words[@]}")
  current="${current#"$prefix"}"
  if [[ $kinds == *fo* ]]; then
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -d -- "$current")
  elif [[ $kinds == *fi* ]]; then
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$current")
  fi
  if [[ -n $kinds ]]; then compopt -o filenames 2> /dev/null; fi
  for ((i = 0; i < ${#COMPREPLY[@]}; i++)); do
    # The part that bash split off is already on the command line.
    if [[ $COMP_WORDBREAKS != *=* ]]; then COMPREPLY[i]="$prefix${COMPREPLY[i]}"; fi
    if [[ $COMP_WORDBREAKS == *:* ]]; then COMPREPLY[i]="${COMPREPLY[i]#"${current%"${current##*:}"}"}"; fi
    if [[ ${COMPREPLY[i]} == *[=.] ]]; then compopt -o nospace 2> /dev/null; fi
  done
}
complete -F _zaya zaya
