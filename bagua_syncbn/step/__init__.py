"""The step: statistics, normalization, derivatives of any order. :mod:`bagua_syncbn.sync` has what crosses ranks."""
