"""Jobs of several ranks on this machine: whole layers, and training, peer beside peer."""
