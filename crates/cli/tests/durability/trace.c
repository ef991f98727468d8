/* Preloaded into a program: writes down what it does to files and folders that outlives a power cut or does not, one line each,
 * into the file that TRACE names, and ends the program without a word before the line whose number TRACE_END_AT names.
 *
 *   sync INODE
 *   rename FROM TO
 *   remove PATH
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long lines;

static void note(const char *format, ...) {
    const char *path = getenv("TRACE"), *end = getenv("TRACE_END_AT");
    if (!path) return;
    char line[3 * PATH_MAX];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    if (end && lines == atol(end)) _exit(86);
    lines++;
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0 || write(file, line, length) != length) _exit(87);
    close(file);
    pthread_mutex_unlock(&lock);
}

/* The path of a name in an open folder. */
static const char *in_folder(int folder, const char *name, char *out) {
    char link[64];
    if (folder == AT_FDCWD || name[0] == '/') return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) return name;
    snprintf(out + length, PATH_MAX, "/%s", name);
    return out;
}

static void note_sync(int file) {
    struct stat found;
    if (fstat(file, &found) == 0) note("sync %llu\n", (unsigned long long)found.st_ino);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int fsync(int file) {
    REAL(fsync);
    note_sync(file);
    return real(file);
}

int fdatasync(int file) {
    REAL(fdatasync);
    note_sync(file);
    return real(file);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    note("rename %s %s\n", from, to);
    return real(from, to);
}

int unlink(const char *path) {
    REAL(unlink);
    note("remove %s\n", path);
    return real(path);
}

int rmdir(const char *path) {
    REAL(rmdir);
    note("remove %s\n", path);
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    char whole[2 * PATH_MAX];
    note("remove %s\n", in_folder(folder, path, whole));
    return real(folder, path, flags);
}
