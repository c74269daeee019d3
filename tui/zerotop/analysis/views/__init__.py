"""The values that screens show at a cursor, live and in replay. Opens no files; draws nothing."""
