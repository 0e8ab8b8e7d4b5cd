"""Undocumented parts of torch that this package uses, all in this folder.

============================================  ===================================  ============================"""
