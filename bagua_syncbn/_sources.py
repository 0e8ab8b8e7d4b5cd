"""Identifies the sources of the native library. setup.py runs this file too."""

from hashlib import sha256
from pathlib import Path


def digest_of(checkout: Path) -> str | None:
    """Returns a digest of ``csrc``, or None if ``checkout`` is another folder, such as site-packages."""
    if not (checkout / "csrc" / "packed_stats.h").exists():
        return None
    files = sorted(path for path in checkout.glob("csrc/**/*.*") if path.is_file())
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
