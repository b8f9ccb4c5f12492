// Put in front of the C library by LD_PRELOAD: files that fail as FAULTS says, words such as "slow full:100000 named network".
//   slow      a write waits for 20 ms first
//   full:N    the disk is full when N bytes were written at places in files (pwrite)
//   named     there are no files without a name (O_TMPFILE)
//   network   folders lie on NFS
//   threads   libstdc++ can start no thread

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

static const char * fault(const char * name) {
    const char * all = getenv("FAULTS");
    const char * at  = all ? strstr(all, name) : NULL;
    return at ? at + strlen(name) : NULL;
}

static atomic_llong written;

ssize_t pwrite(int file, const void * data, size_t n, off_t at) {
    static ssize_t (*next)(int, const void *, size_t, off_t);
    next = (ssize_t (*)(int, const void *, size_t, off_t)) dlsym(RTLD_NEXT, "pwrite");
    if (fault("slow")) {
        usleep(20000);
    }
    const char * most = fault("full:");
    if (most && atomic_fetch_add(&written, (long long) n) + (long long) n > atoll(most)) {
        errno = ENOSPC;
        return -1;
    }
    return next(file, data, n, at);
}

int open(const char * path, int flags, ...) {
    static int (*next)(const char *, int, ...);
    next = (int (*)(const char *, int, ...)) dlsym(RTLD_NEXT, "open");
    va_list rest;
    va_start(rest, flags);
    const int mode = va_arg(rest, int);
    va_end(rest);
    if ((flags & O_TMPFILE) == O_TMPFILE && fault("named")) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return next(path, flags, mode);
}

int statfs(const char * path, struct statfs * out) {
    static int (*next)(const char *, struct statfs *);
    next           = (int (*)(const char *, struct statfs *)) dlsym(RTLD_NEXT, "statfs");
    const int code = next(path, out);
    if (fault("network")) {
        out->f_type = 0x6969;
    }
    return code;
}

int pthread_create(pthread_t * thread, const pthread_attr_t * attr, void * (*run)(void *), void * with) {
    static int (*next)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *);
    next = (int (*)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *)) dlsym(RTLD_NEXT, "pthread_create");
    Dl_info from;
    if (fault("threads") && dladdr(__builtin_return_address(0), &from) && strstr(from.dli_fname, "libstdc++")) {
        return EAGAIN;
    }
    return next(thread, attr, run, with);
}
