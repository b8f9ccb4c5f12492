// Functions that glibc got after 2.27, for libraries that old_glibc.py helps to link. Hidden: each library has its own.

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#pragma GCC visibility push(hidden)

struct stat;
extern int __xstat(int version, const char * path, struct stat * out) __attribute__((visibility("default")));
extern int __lxstat(int version, const char * path, struct stat * out) __attribute__((visibility("default")));
extern int __fxstat(int version, int file, struct stat * out) __attribute__((visibility("default")));
extern int __fxstatat(int version, int folder, const char * path, struct stat * out, int flags)
    __attribute__((visibility("default")));

#ifdef __x86_64__
enum { STAT_VERSION = 1 };
#else
enum { STAT_VERSION = 0 };
#endif

int stat(const char * path, struct stat * out) {
    return __xstat(STAT_VERSION, path, out);
}

int lstat(const char * path, struct stat * out) {
    return __lxstat(STAT_VERSION, path, out);
}

int fstat(int file, struct stat * out) {
    return __fxstat(STAT_VERSION, file, out);
}

int fstatat(int folder, const char * path, struct stat * out, int flags) {
    return __fxstatat(STAT_VERSION, folder, path, out, flags);
}

// 2.32: whether reference counts may do without atomic operations; never, here
char __libc_single_threaded = 0;

// 2.36: four random bytes, of which libstdc++ makes std::random_device
unsigned arc4random(void) {
    unsigned bytes;
    while (getrandom(&bytes, sizeof(bytes), 0) != sizeof(bytes)) {
        if (errno != EINTR) {
            abort();
        }
    }
    return bytes;
}

int getcpu(unsigned * cpu, unsigned * node) {
    return (int) syscall(SYS_getcpu, cpu, node, NULL);
}

// of a program that mtmd starts in a folder of the caller's choice, which kvedge never does
int posix_spawn_file_actions_addchdir_np(void * actions, const char * path) {
    (void) actions;
    (void) path;
    return ENOSYS;
}

// 2.30: waits until a time of any clock; before, of the clock that the condition was made with, which is the real time
int pthread_cond_clockwait(pthread_cond_t * condition, pthread_mutex_t * mutex, clockid_t clock,
                           const struct timespec * end) {
    struct timespec now, real;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &real);
    real.tv_sec += end->tv_sec - now.tv_sec;
    real.tv_nsec += end->tv_nsec - now.tv_nsec;
    if (real.tv_nsec < 0) {
        real.tv_sec--;
        real.tv_nsec += 1000000000;
    } else if (real.tv_nsec >= 1000000000) {
        real.tv_sec++;
        real.tv_nsec -= 1000000000;
    }
    return pthread_cond_timedwait(condition, mutex, &real);
}
