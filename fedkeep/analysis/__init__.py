"""Comparison and export of finished runs. Reads run folders, trains nothing."""
