"""Code that the commands share: session lookup, errors, exit messages and text output."""
