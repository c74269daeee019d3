"""Reading recordings: opening, tailing, packing, finding. Knows files and columns, not their meaning."""
