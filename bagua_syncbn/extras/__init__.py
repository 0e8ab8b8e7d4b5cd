"""Extras, which attach to layers and calls from outside. No module that the layer imports imports one of them."""
