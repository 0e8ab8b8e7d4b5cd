"""The step of a call, and other ways through it. Read ``function`` first; :mod:`bagua_syncbn.sync` has the messages."""
