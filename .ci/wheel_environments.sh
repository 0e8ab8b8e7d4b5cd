#!/usr/bin/env bash
# wheel_environments.sh WHEEL PYTHON:TORCH...   tests the wheel in an environment for each pair.
# PYTHON is on the path or in pyenv; TORCH is a pip requirement, or "=" and the directory of an existing environment:
# python3.10:=/path/to/environment.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "$1"); shift

find_python() {
  for python in "$1" "$HOME"/.pyenv/versions/"${1#python}".*/bin/python; do
    "$python" -c "import sys; sys.exit('python%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null && echo "$python" && return
  done
  echo "$1 is needed: install it or leave it out of WHEEL_ENVIRONMENTS" >&2
  return 1
}

for environment in "$@"; do
  python=${environment%%:*} torch=${environment#*:}
  if [ "${torch#=}" != "$torch" ]; then
    directory=${torch#=}
  else
    directory=build/wheel-environments/$python-$torch
    [ -d "$directory" ] || "$(find_python "$python")" -m venv "$directory"
    "$directory/bin/python" -m pip install --quiet "$torch"
  fi
  "$directory/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
  "$directory/bin/python" -m pip install --quiet 'bagua_syncbn[test]'
  directory=$(realpath "$directory")
  # Outside of the sources, so that the installed package is imported. All other tests need the checkout.
  tests=$(mktemp -d)
  cp pyproject.toml "$tests"
  cp -r benchmarks docs tests "$tests"
  (cd "$tests" && "$directory/bin/python" -m bagua_syncbn &&
    "$directory/bin/python" -m pytest -q -p no:cacheprovider -m 'not gpu and not slow' \
      tests/contract tests/layer/test_layer.py tests/layer/test_errors.py tests/layer/test_wrappers.py \
      tests/conversion tests/communicators tests/ops/test_ops.py tests/ops/test_native.py tests/ops/test_values.py \
      tests/ops/test_headers.py tests/tools/test_info.py \
      tests/step/test_capture.py tests/step/test_compile.py \
      tests/step/test_fused.py tests/step/test_recompute_outputs.py \
      tests/step/test_recomputation.py tests/step/test_transforms.py)
  rm -r "$tests"
done
