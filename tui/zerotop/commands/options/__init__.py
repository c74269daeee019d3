"""Options of the command line: types that parse their values, and options that several commands share.

The commands themselves are in other modules.
"""
