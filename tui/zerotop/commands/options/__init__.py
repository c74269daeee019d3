"""Options of the command line: types that parse their values, and those that several commands share.

What a command does with them is in its own module.
"""
