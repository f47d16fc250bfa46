#!/usr/bin/env bash
# The device part of the parity tests, on a machine with an accelerator: every test whose framework has one there.
# Needs the frameworks and pytest installed, and this project (python -m pip install --no-deps -e .).
set -euo pipefail
cd "$(dirname "$0")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false # torch and JAX share the device's memory
python -m samelogits.cli doctor
for backend in torch jax; do # exact arithmetic: the string that every CPU gives
  python -m samelogits.cli fingerprint shakespeare --backend "$backend" \
    --verify "$(cat samelogits/models/shakespeare/fingerprint.txt)"
done
python -m pytest -m gpu --slow "$@"
