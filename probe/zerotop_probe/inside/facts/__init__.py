"""Facts of an engine or loop (sizes, dtypes, optimizer, ZeRO settings), read once and recorded as one event."""
