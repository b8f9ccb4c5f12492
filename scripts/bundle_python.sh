#!/bin/sh
# Builds a Python without shared libraries of its own, for build_bundle.py, inside a Debian 11 root: so it needs glibc
# 2.31 only. Python and OpenSSL are Debian's sources with Debian's security patches. The result lies in /b/out/python.
set -ex
mkdir -p /b && cd /b
mirror=$(awk '/^deb / {print $2; exit}' /etc/apt/sources.list) # debootstrap's
mirror=${mirror%/}
for suite in bookworm trixie; do
    echo "deb-src $mirror $suite main"
    echo "deb-src ${mirror%/debian}/debian-security $suite-security main"
done > /etc/apt/sources.list.d/sources.list
apt-get update
apt-get install -y --no-install-recommends gcc libc6-dev make perl dpkg-dev xz-utils \
    zlib1g-dev libffi-dev libsqlite3-dev libbz2-dev liblzma-dev
apt-get source --download-only python3.13
for version in $(apt-cache showsrc openssl | awk '/^Version/ {print $2}' | sort -Vru); do
    apt-get source --download-only "openssl=$version" && break  # a mirror may lack the newest
done
for name in openssl python3.13; do
    rm -rf "$name" && mkdir "$name"
    tar xf "$(ls ${name}_*.orig.tar.[gx]z | sort -V | tail -1)" -C "$name" --strip-components=1
    tar xf "$(ls ${name}_*.debian.tar.xz | sort -V | tail -1)" -C "$name"
    (cd "$name" && for patch in $(awk '!/^#/ {print $1}' debian/patches/series); do
        patch -p1 -s -N < "debian/patches/$patch"
    done)
done
cd /b/openssl
./Configure linux-x86_64 --prefix=/b/ssl --libdir=lib --openssldir=/etc/ssl -O2 no-shared no-tests no-docs no-apps \
    no-legacy no-engine no-dso no-module no-aria no-bf no-camellia no-cast no-idea no-mdc2 no-rc2 no-rc4 no-seed \
    no-sm2 no-sm3 no-sm4 no-whirlpool no-cmp no-cms no-ct no-srp no-dtls no-quic no-ssl-trace no-comp no-ts
make -j2 build_libs && make install_dev
cd /b/python3.13
L=/usr/lib/x86_64-linux-gnu
export MODULE_BUILDTYPE=static
export ZLIB_LIBS=$L/libz.a ZLIB_CFLAGS=" " BZIP2_LIBS=$L/libbz2.a BZIP2_CFLAGS=" " LIBFFI_LIBS=$L/libffi.a
export LIBFFI_CFLAGS=" " LIBLZMA_LIBS="$L/liblzma.a -lpthread" LIBLZMA_CFLAGS=" " LIBSQLITE3_CFLAGS=" "
export LIBSQLITE3_LIBS="$L/libsqlite3.a -lm -lpthread -ldl"
for module in _tkinter _curses _curses_panel readline _dbm _gdbm nis _uuid; do
    export "py_cv_module_$module=n/a"
done
# the names of these archives are hidden: a wheel's own zlib or OpenSSL must not find ours
hidden=libcrypto.a:libssl.a:libz.a:libffi.a:libsqlite3.a:liblzma.a:libbz2.a
./configure --prefix=/python --disable-test-modules --without-ensurepip --without-readline --with-openssl=/b/ssl \
    --without-doc-strings CFLAGS="-O2 -g0" LDFLAGS="-Wl,--exclude-libs,$hidden"
make -j2 && rm -rf /b/out && make install DESTDIR=/b/out
strip /b/out/python/bin/python3.13
mkdir /b/out/python/licenses
cp /b/python3.13/LICENSE /b/out/python/licenses/python.txt
cp /b/openssl/LICENSE.txt /b/out/python/licenses/openssl.txt
for package in zlib1g libffi libsqlite3 libbz2 liblzma; do
    cp /usr/share/doc/$package-dev/copyright "/b/out/python/licenses/$package.txt"
done
