"""Calls of undocumented torch functions."""
