// A disk that fails on order: LD_PRELOAD puts these calls before the C library's.
//
//   FAULT_FOLDER  only what lies in this folder is hit
//   FAULT_CALLS   which calls: "write", "fsync", "rename" or "change" (open to write, mkdir, rename, unlink)
//   FAULT_ERRNO   what they fail with; 0 lets them pass
//   FAULT_FROM    the first call that is hit, counted from 1
//   FAULT_TIMES   how many are hit
//   FAULT_MILLISECONDS  how long a call that is hit takes
//   FAULT_COUNTS  a file that gets the numbers of calls by kind, when the process ends
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { WRITE, FSYNC, RENAME, CHANGE, KINDS };
static const char *const names[KINDS] = {"write", "fsync", "rename", "change"};
static atomic_long counts[KINDS];

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int inside(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int inside_at(int folder, const char *path) {
    char link[64], base[PATH_MAX], whole[2 * PATH_MAX];
    if (!path) return 0;
    if (path[0] == '/') return inside(path);
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    return inside(whole);
}

static int inside_file(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path);
}

// Whether a call is to fail; errno says then how.
static int hit(enum kind kind) {
    const char *calls = getenv("FAULT_CALLS");
    long nth = atomic_fetch_add(&counts[kind], 1) + 1, first = number("FAULT_FROM", 1);
    if (!calls || strcmp(calls, names[kind])) return 0;
    if (nth < first || nth - first >= number("FAULT_TIMES", LONG_MAX)) return 0;
    long slow = number("FAULT_MILLISECONDS", 0), error = number("FAULT_ERRNO", 0);
    if (slow) nanosleep(&(struct timespec){slow / 1000, slow % 1000 * 1000000}, NULL);
    if (error) errno = (int)error;
    return error != 0;
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("FAULT_COUNTS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (int kind = 0; kind < KINDS; kind++) fprintf(file, "%s %ld\n", names[kind], (long)counts[kind]);
    fclose(file);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITING(name, result, arguments, ...) \
    result name arguments { return inside_file(file) && hit(WRITE) ? -1 : NEXT(name)(__VA_ARGS__); }

WRITING(write, ssize_t, (int file, const void *bytes, size_t size), file, bytes, size)
WRITING(pwrite, ssize_t, (int file, const void *bytes, size_t size, off_t at), file, bytes, size, at)
WRITING(pwrite64, ssize_t, (int file, const void *bytes, size_t size, off64_t at), file, bytes, size, at)
WRITING(writev, ssize_t, (int file, const struct iovec *parts, int n), file, parts, n)
WRITING(pwritev, ssize_t, (int file, const struct iovec *parts, int n, off_t at), file, parts, n, at)

int fsync(int file) { return inside_file(file) && hit(FSYNC) ? -1 : NEXT(fsync)(file); }
int fdatasync(int file) { return inside_file(file) && hit(FSYNC) ? -1 : NEXT(fdatasync)(file); }

static int renaming(int from, const char *old, int to, const char *new) {
    if (!inside_at(from, old) && !inside_at(to, new)) return 0;
    return hit(CHANGE) || hit(RENAME);
}

int rename(const char *old, const char *new) {
    return renaming(AT_FDCWD, old, AT_FDCWD, new) ? -1 : NEXT(rename)(old, new);
}

int renameat(int from, const char *old, int to, const char *new) {
    return renaming(from, old, to, new) ? -1 : NEXT(renameat)(from, old, to, new);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return renaming(from, old, to, new) ? -1 : NEXT(renameat2)(from, old, to, new, flags);
}

int mkdir(const char *path, mode_t mode) {
    return inside_at(AT_FDCWD, path) && hit(CHANGE) ? -1 : NEXT(mkdir)(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    return inside_at(folder, path) && hit(CHANGE) ? -1 : NEXT(mkdirat)(folder, path, mode);
}

int unlink(const char *path) {
    return inside_at(AT_FDCWD, path) && hit(CHANGE) ? -1 : NEXT(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    return inside_at(folder, path) && hit(CHANGE) ? -1 : NEXT(unlinkat)(folder, path, flags);
}

static int opening(int folder, const char *path, int flags) {
    int changes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
    return changes && inside_at(folder, path) && hit(CHANGE);
}

#define MODE(last)                                          \
    mode_t mode = 0;                                        \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) { \
        va_list rest;                                       \
        va_start(rest, last);                               \
        mode = va_arg(rest, mode_t);                        \
        va_end(rest);                                       \
    }
#define OPEN(name)                                                                \
    int name(const char *path, int flags, ...) {                                  \
        MODE(flags)                                                               \
        return opening(AT_FDCWD, path, flags) ? -1 : NEXT(name)(path, flags, mode); \
    }
#define OPENAT(name)                                                              \
    int name(int folder, const char *path, int flags, ...) {                      \
        MODE(flags)                                                               \
        return opening(folder, path, flags) ? -1 : NEXT(name)(folder, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
