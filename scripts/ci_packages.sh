#!/usr/bin/env bash
# Debian packages that a step of .ci/run needs: scripts/ci_packages.sh PACKAGE...
# Installs those that are missing, which takes root. Where there is no dpkg it leaves them to whoever set up the machine.
set -euo pipefail

command -v dpkg-query >/dev/null || exit 0
missing=()
for package in "$@"; do
    if [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
        missing+=("$package")
    fi
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: missing packages; as root: apt-get install ${missing[*]}" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >&2; then
    echo "error: apt-get cannot install ${missing[*]}; its messages are above" >&2
    exit 1
fi
