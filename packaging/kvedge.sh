#!/bin/sh
# Starts kvedge with the Python beside it. exec keeps the process's number and signals.
self=$0
[ -L "$self" ] && self=$(readlink -f "$self")
bin=$(cd "${self%/*}" && pwd) || exit 1
if [ ! -e /lib64/ld-linux-x86-64.so.2 ]; then
    echo "error: this system has no glibc (Alpine has musl): run kvedge on a system with glibc 2.31 or newer" >&2
    exit 1
fi
if [ ! -e /proc/self/exe ]; then
    echo "error: /proc is missing, by which programs find their libraries: mount -t proc proc /proc" >&2
    exit 1
fi
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null)
case $glibc in
    "glibc 2."[0-9] | "glibc 2."[12][0-9] | "glibc 2.30")
        echo "error: this system has $glibc, kvedge needs 2.31 or newer: use Debian 11, Ubuntu 20.04 or newer" >&2
        exit 1 ;;
esac
if ! [ "${SSL_CERT_FILE-}" ] && ! [ -e /etc/ssl/certs ]; then
    export SSL_CERT_FILE="$bin/../lib/python3.13/dist-packages/certifi/cacert.pem"
fi
exec "$bin/python3" -I -m pykvedge "$@"
