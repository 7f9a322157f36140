"""Comparing and exporting finished runs. Reads run folders, trains nothing."""
