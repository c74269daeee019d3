"""A recording as a trace of Perfetto: tracks of nested phases, counters, and findings as instants."""
