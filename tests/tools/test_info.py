"""What an installation says of itself, and what importing it brings."""

import json
import subprocess
import sys

import torch

import bagua_syncbn


def test_info():
    text = subprocess.run([sys.executable, "-m", "bagua_syncbn"], capture_output=True, text=True, check=True)
    data = subprocess.run([sys.executable, "-m", "bagua_syncbn.info", "--json"], capture_output=True, check=True)
    info = json.loads(data.stdout)
    assert info["bagua_syncbn"] == bagua_syncbn.__version__
    assert info["torch"] == torch.__version__
    assert all(key in text.stdout for key in info)


def test_import_is_light():
    code = "import sys, bagua_syncbn; print([m for m in ('bagua', 'torch._dynamo', 'torchvision') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
