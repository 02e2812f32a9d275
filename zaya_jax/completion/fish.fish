# The words behind "zaya"; of launch and supervise those behind "--", where another verb begins.
function __zaya_words
    set -l words (commandline -opc)
    set -e words[1]
    if set -l border (contains -i -- -- $words)
        set words $words[(math $border + 1)..]
    end
    printf '%s\n' $words
end

# Whether the line begins with these words.
function __zaya_behind
    set -l words (__zaya_words)
    set -l number (count $argv)
    test (count $words) -ge $number; and test "$words[1..$number]" = "$argv"
end

# Whether the line has these words and no other.
function __zaya_only
    set -l words (__zaya_words)
    test "$words" = "$argv"
end

complete -c zaya -f
