"""Reading recordings: opening, tailing, finding, exporting. Knows files and columns, not their meaning."""
