"""Events of a recording: read from their files, checked against their declarations, found by name and process."""
