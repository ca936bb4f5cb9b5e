"""What a run leaves on disk: versioned files, arrays and rows in, arrays and rows out. Nothing is imported here."""
