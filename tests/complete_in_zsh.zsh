# Prints what each line of "$@" becomes when it is completed at a terminal, by the script "$1".
# The terminal is zsh's own; the line is read from its editor, not from what the terminal shows.
zmodload zsh/zpty
zpty terminal zsh -f -i
zpty -w terminal "autoload -Uz compinit; compinit -u -D; source ${(q)1}"
zpty -w terminal 'show() { print -r -- "<<$BUFFER>>"; BUFFER= }; zle -N show; bindkey "^X" show; print "rea""dy"'
zpty -r terminal shown '*ready*'
shift
for line; do
  zpty -w -n terminal "$line"$'\t\C-x'
  zpty -r terminal shown '*<<*>>*'
  print -r -- "<${${shown##*<<}%%>>*}>"
done
zpty -d terminal
