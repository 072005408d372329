"""Files that hold tables: every format read and written in blocks."""
