"""Pages of the second demo model: numbered lines, tables and bar charts in the system's fonts, and questions."""
