#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that can make environments (Debian packs ensurepip apart): the
# PATH first, then pyenv's versions.
# Says what to install and fails where there is none.
set -eu
recent() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }
candidates() {
  [ -z "${PYTHON:-}" ] || echo "$PYTHON"
  for name in python3.12 python3.13 python3.14 python3 python; do command -v "$name" || true; done
  for root in "${PYENV_ROOT:-}" "$HOME/.pyenv"; do
    [ -z "$root" ] || ls -d "$root"/versions/3.1[2-9].*/bin/python 2>/dev/null || true
  done
}
while read -r python; do
  if recent "$python"; then
    echo "$python"
    exit 0
  fi
done < <(candidates)
cat >&2 <<'MESSAGE'
jaxserve needs Python 3.12 or newer, with its venv module, and found none.
Install one of:
  Debian 13, Ubuntu 24.04 or newer:  sudo apt install python3 python3-venv
  Fedora:                            sudo dnf install python3.12
  macOS:                             brew install python@3.12
  anywhere:                          pyenv install 3.12   (or: uv python install 3.12)
or name it: make PYTHON=/path/to/python3.12
MESSAGE
exit 1
