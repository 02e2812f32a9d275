# Prints the words after "zaya"; for launch and supervise those after "--", where another command begins.
function __zaya_words
    set -l words (commandline -opc)
    set -e words[1]
    if set -l separator (contains -i -- -- $words)
        set words $words[(math $separator + 1)..]
    end
    printf '%s\n' $words
end

# Tests whether the command line begins with these words.
function __zaya_begins_with
    set -l words (__zaya_words)
    set -l number (count $argv)
    test (count $words) -ge $number; and test "$words[1..$number]" = "$argv"
end

# Tests whether the command line consists of these words.
function __zaya_is_exactly
    set -l words (__zaya_words)
    test "$words" = "$argv"
end

complete -c zaya -f
