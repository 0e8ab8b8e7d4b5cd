"""All calls of undocumented torch functions."""
