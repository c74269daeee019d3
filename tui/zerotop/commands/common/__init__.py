"""Code that the commands share: recording lookup, errors, exit messages and text output."""
