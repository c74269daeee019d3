"""One module a command, thin: parse, call, print one sentence when it fails."""
