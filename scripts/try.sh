#!/usr/bin/env bash
# Sets everything up and runs `hayloft try`; arguments go to it.
set -euo pipefail
here=$(dirname "$0")
"$here/setup.sh"
exec "$here/../target/release/hayloft" try "$@"
