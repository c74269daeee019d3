"""Reading recordings: opening, tailing, finding. Knows files and columns, not their meaning."""
