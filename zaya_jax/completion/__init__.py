"""Shell completion of `zaya`: commands, options, their choices and config fields, for bash, zsh and fish.

The scripts are our own because shtab does less: it completes the options of one tree of argparse parsers,
whereas `zaya` has a parser per module, config fields one section at a time, `--option=value`, and after `--`
of `launch` and `supervise` another command.
"""
